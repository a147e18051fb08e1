// Computes the attention of one micro-batch over the entries that the heads keep, on ggml's
// threads: of one sequence (Attention), and of all whose tokens are in the micro-batch
// (AttentionBatch), which the nodes of the graph call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "attention/head_attention.hpp"

namespace entropykv {

// Attends with the tokens of one sequence. Threads claim units of work one by one, and the thread
// that does the last unit of a head merges its partial results. Then the staged entries of the head
// are committed.
class Attention {
public:
    // workers: the scratch of the threads. Sequences of one model can share it, since every thread
    // attends to them one after the other; null: this sequence has its own.
    Attention(HeadStore& store, const KernelTable& kernels, int n_threads,
              std::shared_ptr<Workers> workers = nullptr);

    // With a shared choice, all heads of a layer rank entries by the sum of what they observed, so
    // that heads with equal budgets keep the same positions.
    void set_shared_choice(bool on) { shared_choice_ = on; }
    // Unless recall_interval is 0, recall runs in micro-batches of several tokens that begin() does
    // not exclude, in every recall_interval-th one of a single token, and in the next one if
    // recalls_now() is set to true.
    bool& recalls_now() { return recalls_now_; }
    EntropyMeter& entropies() { return entropies_; }
    const EntropyMeter& entropies() const { return entropies_; }
    QueryCapture& queries() { return queries_; }
    const QueryCapture& queries() const { return queries_; }

    // Must be called before every llama_decode. Reserves pages and scratch for n_text tokens at a
    // position, which RoPE sees at rope_position, and for n_echo tokens behind them: an echo asks
    // the model to repeat the text and then repeats it. Its tokens attend to the text and to each
    // other like any others, but their K and V are not kept. Their queries count towards importance
    // (measure reconstruct counts no others); where scores are predicted, they only raise these. An
    // echo may come alone, for a text that was read before. With see_all, every token attends to
    // all tokens of the micro-batch, also to later ones, as those of some images do; there is no
    // echo then. No later call allocates memory. Throws std::invalid_argument for numbers that
    // contradict this, and what HeadStore::reserve() throws.
    //
    // The last n_drafts of the text's tokens are drafts, which may turn out to be wrong. Such a run
    // has one token before them and no echo; each of its tokens attends to what is left after the
    // commit of the one before, as if they were read one by one: see HeadStore::commit_token().
    // settle_drafts() must follow. n_drafts must not exceed most_drafts().
    //
    // recalls: whether several tokens may recall frozen entries. A long prompt can do without
    // before its end, because recall compares queries with every frozen key.
    void begin(const StepTokens& reading);
    // Returns how many drafts may follow the next token, at most `wanted`.
    int most_drafts(int wanted) const;
    void settle_drafts(int n_accepted) { store_.settle_drafts(n_accepted); }

    // The graph calls these in this order, with a barrier between them. Layers whose V is a part of
    // K have no stage_v(). A layer with several readers has one attend() for each, and other layers
    // may lie in between. thread must be below n_threads().
    void stage_k(int layer, const RowsView& k, int thread, int n_threads) noexcept;
    void stage_v(int layer, const RowsView& v, int thread, int n_threads) noexcept;
    void attend(int layer, int reader, const AttentionParams& params, const RowsView& query,
                float* output, int thread) noexcept;  // output [n_tokens][n_head][v_dim]
    // Every thread calls this after attend(), to commit what must not wait for the next layer.
    void commit_due(int thread) noexcept { commits_.run_due(thread); }
    // Returns how many values the output has for one token.
    int output_values(int layer) const {
        return store_.shape(layer).n_head * store_.shape(layer).v_dim;
    }
    HeadStore& store() { return store_; }
    const HeadStore& store() const { return store_; }

    // Counts the bytes besides the store: partial results, what was observed, recorded queries and
    // entropies, and the scratch of the threads unless other sequences share it.
    std::size_t scratch_bytes() const;
    // Frees scratch between micro-batches, after budgets shrank; the next micro-batch allocates
    // what it needs.
    void release_scratch();

    int n_threads() const { return n_threads_; }
    const Step& step() const { return step_; }  // describes the current micro-batch

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
    void recall(const AttentionCall& call) noexcept;
    void attend_run(const AttentionCall& call) noexcept;

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
    std::deque<UnitQueue> units_;           // one for every reader of every layer
    std::vector<std::size_t> first_units_;  // index in units_, for each layer
    std::vector<float> partials_;           // partial results of the current layer
    std::atomic<int> recalled_heads_{0};
    std::atomic<int> next_head_{0};   // next head of a run with drafts
    std::atomic<bool> ready_{false};  // whether the units of the current layer are made
};

// Attends with the tokens of several sequences. Each sequence attends to its own range of tokens
// with its own store, positions and evictions. Threads go on to the next sequence without waiting
// for each other, so that all of them stay busy.
class AttentionBatch {
public:
    // Begins another micro-batch, which has no tokens yet.
    void clear();
    // Adds the next tokens, which belong to a sequence without tokens in this micro-batch.
    // Sequences with a single token must be added first, and all must share one StorePool. If this
    // throws, nothing was added.
    void add(Attention& sequence, const StepTokens& reading);

    // Returns how many drafts may follow the next token of a sequence, at most `wanted`, so that
    // all other sequences still find room.
    int most_drafts(const Attention& sequence, int wanted) const;

    int n_tokens() const { return n_tokens_; }
    int n_threads() const { return parts_.empty() ? 0 : parts_.front().sequence->n_threads(); }

    // The nodes of the graph call these: see Attention.
    void stage_k(int layer, const RowsView& k, int thread, int n_threads) noexcept;
    void stage_v(int layer, const RowsView& v, int thread, int n_threads) noexcept;
    void attend(int layer, int reader, const AttentionParams& params, const RowsView& query,
                float* output, int thread) noexcept;

private:
    struct Part {
        Attention* sequence;
        int first;  // the sequence's first token in the micro-batch
    };

    std::vector<Part> parts_;
    int n_tokens_ = 0;
    std::size_t n_pages_ = 0;  // pages of the staging area in use
};

}  // namespace entropykv
