// Attention of one micro-batch over what the heads keep, split over ggml's threads: units of work
// are claimed one by one, and the thread that finishes a head's last unit merges its partial
// results. Then the staged entries of heads are committed.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "attention/call.hpp"
#include "attention/commit_queue.hpp"
#include "attention/query_capture.hpp"

namespace entropykv {

class Attention {
public:
    // workers: of sequences of one model, which are attended to one after the other by every
    // thread; none: its own.
    Attention(HeadStore& store, const KernelTable& kernels, int n_threads,
              std::shared_ptr<Workers> workers = nullptr);

    // Every head of a layer ranks by what all of them observed: where their budgets are equal, they
    // keep the same positions.
    void set_shared_choice(bool on) { shared_choice_ = on; }
    // Frozen entries are looked for with every micro-batch of several tokens, and every
    // recall_interval-th single one; now: with the next one, whatever it is.
    bool& recalls_now() { return recalls_now_; }
    EntropyMeter& entropies() { return entropies_; }
    const EntropyMeter& entropies() const { return entropies_; }
    QueryCapture& queries() { return queries_; }
    const QueryCapture& queries() const { return queries_; }

    // Before every llama_decode: reserves pages and scratch for n_text tokens at base_position,
    // which RoPE sees at rope_position, and for n_echo tokens behind them: those ask for the text
    // again and repeat it. They see it, and each other, as any tokens do; their queries, too, tell
    // what entries are worth (to reconstruct, theirs alone), and nothing of them is kept. An echo
    // may come alone, for text that was read before. Nothing after it allocates.
    void begin(int n_text, std::int32_t base_position, std::int32_t rope_position, int n_echo = 0);

    // In the graph, in this order, with a barrier between them; no stage_v() for layers whose V is
    // a part of K; attend() for one reader of the layer after another, other layers in between.
    // thread < n_threads().
    void stage_k(int layer, const RowsView& k, int thread, int n_threads) noexcept;
    void stage_v(int layer, const RowsView& v, int thread, int n_threads) noexcept;
    void attend(int layer, int reader, const AttentionParams& params, const RowsView& query,
                float* output, int thread) noexcept;  // output [n_tokens][n_head][v_dim]
    // After attend(), by every thread: commits what must not wait for the next layer.
    void finish(int thread) noexcept { commits_.run_due(thread); }
    // Values of the output for one token.
    int output_values(int layer) const {
        return store_.shape(layer).n_head * store_.shape(layer).v_dim;
    }
    HeadStore& store() { return store_; }

    // Bytes besides the store: what queries give until it is committed, and, of its own workers,
    // what threads work with.
    std::size_t scratch_bytes() const;
    // Between micro-batches, where budgets shrank: the next one takes what it needs.
    void release_scratch();

    int n_threads() const { return n_threads_; }
    const Step& step() const { return step_; }  // the micro-batch

private:
    UnitQueue& units_of(int layer, int reader) {
        return units_[first_units_[PageLayout::index(layer)] + PageLayout::index(reader)];
    }
    int most_entries(int layer, int head) const;
    void reserve();
    void prepare(int layer, int n_threads) noexcept;
    void make_units(int layer) noexcept;
    template <typename Visit>
    void over_staged(int layer, int thread, int n_threads, Visit visit) noexcept;
    void recall(const Call& call) noexcept;

    HeadStore& store_;
    const KernelTable& kernels_;
    bool shared_choice_ = false;
    bool recalls_now_ = false;
    int n_threads_;
    std::shared_ptr<Workers> shared_workers_;
    Workers& workers_;
    bool owns_workers_;
    Step step_;
    EntropyMeter entropies_;
    QueryCapture queries_;
    Observations observations_;
    CommitQueue commits_;
    std::deque<UnitQueue> units_;           // of every reader of every layer
    std::vector<std::size_t> first_units_;  // of each layer
    std::vector<float> partials_;           // of the layer that is being attended to
    std::atomic<int> recalled_heads_{0};
    std::atomic<bool> ready_{false};  // units are made
};

}  // namespace entropykv
