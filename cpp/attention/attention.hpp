// Attention of one micro-batch over what the heads keep, split over ggml's threads: units of work
// are claimed one by one, and the thread that finishes a head's last unit merges its partial
// results. Then the staged entries of heads are committed; of single tokens, some of a layer's
// heads are only with the next layer, so that all threads have as much to do. The split depends on
// lengths alone, never on the number of threads, so that every number of threads gives the same
// result bit by bit.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "kernels/kernels.hpp"
#include "store/head_store.hpp"

namespace entropykv {

// All kernels that this machine runs, the slowest first.
std::vector<const KernelTable*> available_kernels();

// Constants of one layer's attention.
struct AttentionParams {
    float scale = 1.0f;
    float softcap = 0.0f;          // 0: none
    const float* sinks = nullptr;  // one logit per query head, or null
    // What a logit falls by per position of distance (ALiBi), one per query head, or null.
    const float* slopes = nullptr;
};

// ALiBi's, as ggml computes them from op_params of a flash attention node.
std::vector<float> alibi_slopes(int n_head, float max_bias);

// f32 rows of one micro-batch, [n_tokens][n_head][dim] at byte strides.
struct RowsView {
    const std::byte* data;
    std::size_t token_stride;
    std::size_t head_stride;
    const float* row(int token, int head) const {
        return reinterpret_cast<const float*>(data +
                                              static_cast<std::size_t>(token) * token_stride +
                                              static_cast<std::size_t>(head) * head_stride);
    }
    // The rows from a token on.
    RowsView from(int token) const {
        return {data + static_cast<std::size_t>(token) * token_stride, token_stride, head_stride};
    }
};

class Attention {
public:
    struct Worker {                 // scratch of one thread
        std::vector<float> query;   // a tile
        std::vector<float> output;  // a tile
        std::vector<float> kernel;
        std::vector<float> kept;     // a tile's weights, between attending and observing
        std::vector<float> softmax;  // max, sum, weighted, positions, weights, oldest, slopes
        std::vector<float> recall;   // query rows and their slopes
        std::vector<std::int32_t> recall_positions;  // of those rows
    };
    using Workers = std::vector<Worker>;

    // workers: of sequences of one model, which are attended to one after the other by every
    // thread; none: its own.
    Attention(HeadStore& store, const KernelTable& kernels, int n_threads,
              std::shared_ptr<Workers> workers = nullptr);

    void set_entropy_tracking(bool on) { track_entropy_ = on; }
    // Every head of a layer ranks by what all of them observed: where their budgets are equal, they
    // keep the same positions.
    void set_shared_choice(bool on) { shared_choice_ = on; }
    // Keeps the queries of every micro-batch, for those who look at single attention rows.
    void set_query_capture(bool on) { capture_queries_ = on; }

    // Frozen entries are looked for with every micro-batch of several tokens, and every
    // recall_interval-th single one; now: with the next one, whatever it is.
    void recall_now() { recall_now_ = true; }

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
    void finish(int thread) noexcept { run_commits(commits_due_, thread); }
    // Values of the output for one token.
    int output_values(int layer) const {
        return store_.shape(layer).n_head * store_.shape(layer).v_dim;
    }
    HeadStore& store() { return store_; }

    // Bytes besides the store: what queries give until it is committed, and, of its own workers,
    // what threads work with.
    std::size_t scratch_bytes() const;
    static std::size_t bytes_of_workers(const Workers& workers);
    // Between micro-batches, where budgets shrank: the next one takes what it needs.
    void release_scratch();

    int n_threads() const { return n_threads_; }
    int n_tokens() const { return n_tokens_; }  // of the micro-batch, those of the echo too
    int n_text() const { return n_text_; }      // without them

    // Since the last reset: sum of the entropies (bits) of the attention rows of every query head
    // of a layer, of all its readers, and how many rows there were. An attention sink counts as one
    // more entry.
    const std::vector<double>& entropy_sums(int layer) const;
    std::int64_t entropy_rows(int layer) const;
    void reset_entropy();

    // Of the last micro-batch, while entropies are tracked: the entropy (bits) of every attention
    // row of a layer's last reader, [n_tokens][n_head].
    std::vector<float> row_entropies(int layer) const;

    // Of the last micro-batch, while queries are captured: what the rows of a layer's last reader
    // were made from.
    struct Capture {
        std::vector<float> queries;  // [n_tokens][n_head][k_dim], scaled
        std::vector<float> sinks;    // one logit per query head; kMaskedLogit: none
        std::vector<float> slopes;   // one per query head; 0: none
        float softcap = 0.0f;
    };
    const Capture& capture(int layer) const { return captures_.at(index(layer)); }

private:
    struct Split {      // how the micro-batch of one layer becomes units
        int group;      // query heads of a KV head
        int rows;       // n_tokens * group, token-major
        int tile_rows;  // of a full tile
        int tiles;
        int band_tiles;   // tiles of a band: one thread attends to them, one after the other
        bool by_rows;     // the prompt kernel
        bool by_entries;  // a unit is a range of entries of a tile, merged at the end; else a band
    };
    struct Job {  // one reader of a layer: sized by the constructor, filled by prepare()
        explicit Job(int n_heads);
        std::vector<int> first_unit;  // of each head, and the total
        std::unique_ptr<std::atomic<int>[]> unfinished_units;
        std::unique_ptr<std::atomic<int>[]> next_unit;  // of each head
        std::atomic<int> unfinished_heads{0};
    };
    struct Call {
        int layer;
        int reader;
        Job* job;
        Split split;
        const AttentionParams* params;
        const RowsView* query;
        float* output;
        int thread;
    };
    struct Tile {  // rows [first, first + count) of a KV head
        int head;
        int number;
        int first;
        int count;
    };
    struct Unit {
        Tile tile;  // the first one of a band
        int chunk;
    };
    struct Carried {                  // what a layer's readers saw, but for the last one
        std::vector<float> observed;  // [head][longest_]
        std::vector<float> squares;   // of outputs, [head]
    };
    struct Cursor {  // where a thread looks for its next unit
        bool others = false;
        int head = 0;
    };
    struct Commit {  // of a head that was attended to
        int layer = 0;
        int head = 0;
        const float* observed = nullptr;
        float squares = 0.0f;  // of the outputs, where they are measured
        std::atomic<bool> ready{false};
    };
    struct LayerEntropy {
        std::vector<double> sums;
        std::int64_t rows = 0;
        std::vector<float> last;  // of the last micro-batch, [KV head][row]
    };

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    Split split_of(int layer) const;
    static int chunk_entries(const Split& split, int total);
    static int chunks_of(const Split& split, int total);
    int total_entries(int layer, int head) const { return store_.count(layer, head) + n_tokens_; }
    int first_observed_row(const Split& split) const;
    int first_observed_tile(const Split& split) const {
        return first_observed_row(split) / split.tile_rows;
    }
    int observed_bands(const Split& split) const;
    int units_of(const Split& split, int total) const;
    static Tile tile_at(const Split& split, int head, int number);
    Unit unit_at(const Call& call, int unit) const noexcept;
    static int most_chunks(const Split& split, int most);
    void prepare(int layer, int n_threads) noexcept;
    void make_units(int layer) noexcept;
    Job& job_of(int layer, int reader) { return jobs_[first_job_[index(layer)] + index(reader)]; }
    // Whether a head is this thread's: what it holds is then in the cache of one core. It is looked
    // through and committed by this thread, and attended to first.
    bool owns(const Call& call, int head) const noexcept {
        return (commits_before_ + head) % n_working_ == call.thread;
    }
    int claim(const Call& call, Cursor& cursor) noexcept;  // -1: there is none
    template <typename Visit>
    void over_staged(int layer, int thread, int n_threads, Visit visit) noexcept;

    void recall(const Call& call) noexcept;
    void recall_head(const Call& call, int head) noexcept;
    void run_unit(const Call& call, int unit, int next) noexcept;  // next: -1 if there is none
    void run_band(const Call& call, const Tile& first) noexcept;
    void run_rows(const Call& call, const Tile& tile, int chunk) noexcept;
    void run_decode(const Call& call, const Tile& tile, int chunk, int next) noexcept;
    void finish_head(const Call& call, int head) noexcept;
    SoftmaxState merge(const Call& call, const Tile& tile) noexcept;
    void write_output(const Call& call, const Tile& tile, const SoftmaxState& state) noexcept;
    bool is_observed(const Call& call, const Tile& tile) const noexcept;
    bool keeps_weights(const Split& split, int total) const noexcept;
    std::size_t most_kept_floats(const Split& split, int most) const noexcept;
    void observe(const Call& call, const Tile& tile, const SoftmaxState& state) noexcept;
    void observe_decode(const Call& call, const Tile& tile, const SoftmaxState& state) noexcept;
    void note_entropy(const Call& call, const Tile& tile, const SoftmaxState& state) noexcept;
    void add_up(float* total, const float* more, int n) const noexcept;
    float* sum_observed(const Call& call, int head) noexcept;
    float output_squares(const Call& call, int head) const noexcept;
    float* carry(const Call& call, int head, float* observed) noexcept;
    void commit(const Call& call, int head, const float* observed) noexcept;
    void commit_layer(const Call& call) noexcept;
    bool queues(int layer) const noexcept;
    void queue_commit(const Call& call, int head, const float* observed) noexcept;
    void run_commits(int limit, int thread) noexcept;
    void capture_queries(const Call& call) noexcept;

    EntryRange stored_entries(const Call& call, int unit) const noexcept;
    PromptTask prompt_task(const Call& call, const Tile& tile, const SoftmaxState& state) noexcept;
    template <typename Visit>
    void over_ranges(const Call& call, const Tile& tile, int first, int last, Visit visit) noexcept;
    float oldest_relative(int layer, int token) const noexcept;
    void load_queries(const Call& call, const Tile& tile) noexcept;
    void start_softmax(const Call& call, const Tile& tile, int chunk,
                       const SoftmaxState& state) const noexcept;
    SoftmaxState worker_state(const Call& call) noexcept;
    SoftmaxState partial_state(const Call& call, const Tile& tile, int chunk) noexcept;
    float* observed_of(const Call& call, int head, int band) noexcept;
    int band_of(const Call& call, int tile) const noexcept;
    float* logits_of(const Call& call, int head) noexcept;
    const float* row_weights(const Call& call, const Tile& tile) noexcept;

    HeadStore& store_;
    const KernelTable& kernels_;
    bool track_entropy_ = false;
    bool capture_queries_ = false;
    bool shared_choice_ = false;
    std::vector<LayerEntropy> entropy_;
    std::vector<Capture> captures_;
    std::shared_ptr<Workers> shared_workers_;
    Workers& workers_;
    bool owns_workers_;
    int n_threads_;

    // The micro-batch.
    int n_tokens_ = 0;
    int n_text_ = 0;  // of these, before the echo
    std::int32_t base_position_ = 0;
    bool observing_ = false;  // its queries count towards importance
    bool recalling_ = false;  // frozen entries are looked for
    bool recall_now_ = false;

    // Heads of single tokens wait to be committed, each by its own thread.
    std::deque<Commit> commits_;    // as many as there are heads, in the order of the layers
    std::vector<int> next_commit_;  // of each thread
    int n_working_ = 1;             // threads
    int commits_before_ = 0;        // of the layers before
    int commits_so_far_ = 0;        // with this layer
    int commits_due_ = 0;           // when this layer ends

    std::deque<Job> jobs_;
    std::vector<std::size_t> first_job_;  // of each layer
    std::vector<Carried> carried_;        // of each layer

    // The layer that is being attended to: sized by begin(), filled by prepare().
    std::atomic<int> recalled_heads_{0};
    std::atomic<bool> ready_{false};  // units are made
    std::size_t longest_ = 0;         // entries of the longest head, staged ones included
    std::vector<float> partials_;
    std::vector<float> logits_;  // decode: [head][row][longest_]
    // What the observed rows of a band gave, added up tile by tile: [head][observed
    // band][longest_], of single tokens twice: for layers of even and of odd numbers, since a
    // layer's commits may wait for the next one.
    std::vector<float> observed_;
    std::size_t observed_turn_ = 0;  // where the second half begins
};

}  // namespace entropykv
