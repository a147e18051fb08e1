// Attends to the entries of KV heads with the queries of one reader of a layer, as one of ggml's
// threads does: unit by unit, with scratch of the thread. A tile of query rows that is split by
// entries leaves one partial softmax per unit; the thread that has done the last unit of a head
// merges them, and commits the head, or leaves that to a CommitQueue. Until then, Observations
// holds what the queries gave to the entries.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "attention/row_records.hpp"
#include "attention/step.hpp"
#include "decide/importance.hpp"
#include "store/head_store.hpp"

namespace entropykv {

// Holds the scratch of one of ggml's threads.
class Worker {
public:
    // Makes room for a layer, besides all layers that it was called for before. recalls: also for
    // the queries of recall.
    void serve(const PageLayout& layout, bool recalls);
    // Makes room for the attention weights of a tile, which are kept until they are observed.
    void keep(std::size_t n_floats);
    void release();
    std::size_t bytes() const;

    float* query() { return query_.data(); }  // holds one tile
    float* kernel() { return kernel_.data(); }
    float* kept() { return kept_.data(); }
    SoftmaxState state() {
        float* softmax = softmax_.data();
        return {softmax, softmax + kRowTile, softmax + 2 * kRowTile, output_.data()};
    }
    // These hold one value per row of a tile, kRowTile each.
    float* positions() { return softmax_.data() + 3 * kRowTile; }
    float* weights() { return softmax_.data() + 4 * kRowTile; }
    float* oldest() { return softmax_.data() + 5 * kRowTile; }
    float* slopes() { return softmax_.data() + 6 * kRowTile; }
    // These hold the query rows of recall with their slopes, and the positions of those rows.
    float* recall() { return recall_.data(); }
    std::int32_t* recall_positions() { return recall_positions_.data(); }

private:
    std::vector<float> query_;
    std::vector<float> output_;  // one tile
    std::vector<float> kernel_;
    std::vector<float> kept_;
    // Holds max, sum, weighted, positions, weights, oldest and slopes of the rows of a tile.
    std::vector<float> softmax_;
    std::vector<float> recall_;
    std::vector<std::int32_t> recall_positions_;
};

// Holds the scratch of all threads, by their numbers. Sequences of one model can share it.
using Workers = std::vector<Worker>;

std::size_t bytes_of_workers(const Workers& workers);

// Holds what queries give to entries, from the time they attend until the entries are committed.
class Observations {
public:
    Observations(const Measure& measure, std::size_t n_layers)
        : measure_(measure), carried_(n_layers) {}

    // Says how much memory a micro-batch needs.
    struct Room {
        std::size_t longest;  // entries of the longest head, staged ones included
        std::size_t rows;     // rows of a layer: its heads times their observed bands
        std::size_t logits;   // rows of logits of the decode kernel: query heads of a layer
        bool single;          // whether it has one token, whose commits may wait for the next layer
    };
    void begin(const Room& room);
    // Makes room for carry() and, if observing_echo, for carry_largest().
    void begin_carrying(int layer, std::size_t n_heads, bool observing_echo);
    void release();

    // Returns where the decode kernel puts the logits of a row; longest() says how many fit.
    float* logits(int row) noexcept { return logits_.data() + index(row) * longest_; }
    std::size_t longest() const { return longest_; }
    // Returns the row to which the tiles of an observed band of a head add what their queries gave.
    // number: that of the head, times the observed bands of a head, plus that of the band. Rows for
    // the shares of an echo lie behind those of all heads.
    float* row(int layer, int number) noexcept {
        const std::size_t offset = layer % 2 == 0 ? 0 : odd_layers_at_;
        return observed_.data() + offset + index(number) * longest_;
    }
    // Combine n_rows rows from `first` on, of n entries each, in the first row, and return it:
    // sum() as add_up() does, largest() to the maximum.
    float* sum(int layer, int first, int n_rows, int n) noexcept;
    float* largest(int layer, int first, int n_rows, int n) noexcept;
    // Combines what two sets of queries gave to each of n entries: their sum, or for some measures
    // the larger one.
    void add_up(float* total, const float* more, int n) const noexcept;

    // Combines what the readers of a layer observed of a head, and adds up the squares of its
    // outputs. Returns the result up to this reader. observed: null if this reader observed
    // nothing.
    float* carry(int layer, int head, bool is_first, const float* observed, float squares,
                 int n) noexcept;
    // Returns the largest shares that an echo's queries gave, over the readers of a layer up to
    // this one. number: that of the head plus the number of KV heads.
    float* carry_largest(int layer, int number, bool is_first, const float* echo_shares,
                         int n) noexcept;
    float carried_squares(int layer, int head) const noexcept {
        return carried_[index(layer)].squares[index(head)];
    }

    std::size_t bytes() const;

private:
    // Holds what the readers of a layer observed so far.
    struct Carried {
        std::vector<float> observed;  // [head][longest], then the same for shares of an echo
        std::vector<float> squares;   // [head]
    };
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }

    const Measure& measure_;
    std::size_t longest_ = 0;
    std::vector<float> logits_;  // [row][longest]
    // Holds [row][longest]. For single tokens, even and odd layers use different rows.
    std::vector<float> observed_;
    std::size_t odd_layers_at_ = 0;  // rows of odd layers begin there
    std::vector<Carried> carried_;   // one for each layer
};

// When a single token is read, heads wait here until their own thread commits them. If the number
// of heads is no multiple of the number of threads, the remaining heads wait for the next layer, so
// that all threads have equally much to do. They cannot wait longer, because the next layer but one
// overwrites what was staged and observed.
class CommitQueue {
public:
    CommitQueue(HeadStore& store, int n_threads);

    // Must be called before a micro-batch of n_text tokens.
    void begin(int n_text) noexcept;

    // Says what a layer adds to the queue.
    struct LayerCommits {
        int n_heads;  // heads that will be queued; 0: they are committed at once
        bool is_last;
        bool recalls;  // whether run_before() is called before the layer's units are claimed
        int n_threads;
    };
    void prepare(const LayerCommits& layer) noexcept;

    // Tells whether a head of the layer belongs to this thread. That thread attends to the head
    // first, recalls for it and commits it, so that the head's entries are in the cache of one
    // core.
    bool owns(int head, int thread) const noexcept {
        return (before_ + head) % n_working_ == thread;
    }

    void add(int layer, int head, const float* observed, float squares) noexcept;

    // run_before() and run_due() commit heads that belong to this thread: run_before() the heads of
    // the layers before this one, run_due() the heads that must not wait for the next layer. If a
    // head of this layer is not ready yet, the thread that attends to it does not wait for anybody,
    // so this cannot deadlock.
    void run_before(int thread) noexcept { run(before_, thread); }
    void run_due(int thread) noexcept { run(due_, thread); }

private:
    // Names a head that was attended to, and what its queries observed.
    struct Commit {
        int layer = 0;
        int head = 0;
        const float* observed = nullptr;
        float squares = 0.0f;  // of the head's outputs, added up; 0 unless losses are measured
        std::atomic<bool> ready{false};
    };

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    void run(int limit, int thread) noexcept;

    HeadStore& store_;
    int n_text_ = 0;
    std::deque<Commit> commits_;  // one for every head, in the order of the layers
    std::vector<int> next_;       // the next commit of each thread
    int n_working_ = 1;           // threads that share the heads
    int before_ = 0;              // heads of the layers before this one
    int so_far_ = 0;              // heads up to this layer
    int due_ = 0;                 // heads that must be committed when this layer ends
};

// Tells whether the heads of a layer are committed through the queue: when a single token is read,
// and no other reader or head needs what they observed.
inline bool queues(const Step& step, const LayerShape& shape, bool shared_choice) noexcept {
    return step.n_tokens == 1 && shape.readers == 1 && !shared_choice;
}

struct CallOfSequence {
    HeadStore& store;
    const KernelTable& kernels;
    EntropyMeter& entropies;
    Observations& observations;
    CommitQueue& commits;
    bool shared_choice;  // see Attention::set_shared_choice()
    float* partials;     // partial results of tiles that are split by entries
};

struct CallOfNode {
    int layer;
    int reader;
    UnitQueue& units;
    const AttentionParams& params;
};

struct CallOfThread {
    int thread;
    Worker& worker;
};

// Names the tokens that attend, and where their outputs go.
struct CallOfTokens {
    const Step& step;
    Split split;
    const RowsView& query;
    float* output;
    // The number of the token in a run with drafts, whose tokens are attended to one by one.
    int token = 0;
};

// Says all that a thread needs to know to attend for one reader of a layer.
struct AttentionCall : CallOfSequence, CallOfNode, CallOfThread, CallOfTokens {
    const LayerShape& shape() const { return store.shape(layer); }
    const PageLayout& layout() const { return store.layout(layer); }
    const Head& head(int number) const { return store.head(layer, number); }
    // Returns the pages of a head's staged entries; every token of a run with drafts has its own.
    std::byte* const* staging(int head) const { return store.staging(layer, head) + token; }
    // Returns how many entries a head attends to: stored and staged ones.
    int total(int head) const { return this->head(head).count() + step.n_tokens; }
    // Loads a query of a KV head's group, scaled, and in the units of the head's keys; `apart`: the
    // distance of the values.
    void load_query(int head, int token, int of_group, float* row, std::size_t apart) const {
        const PageLayout& layout = this->head(head).layout();
        const float* source = query.row(token, head * split.group + of_group);
        const auto n = static_cast<std::size_t>(layout.k_dim);
        if (layout.key_centre == nullptr) {
            for (std::size_t d = 0; d < n; ++d) row[d * apart] = source[d] * params.scale;
            return;
        }
        const float* unit = layout.key_centre->unit.data();
        for (std::size_t d = 0; d < n; ++d) row[d * apart] = source[d] * params.scale * unit[d];
    }
    // Returns by how much the logits of a query (see load_query()) are smaller than those of the
    // model, because keys are stored with a centre.
    float missing_logit(int head, int token, int of_group) const {
        const PageLayout& layout = this->head(head).layout();
        if (layout.key_centre == nullptr) return 0.0f;
        const float* source = query.row(token, head * split.group + of_group);
        float sum = 0.0f;
        for (int d = 0; d < layout.k_dim; ++d)
            sum += source[d] * layout.key_centre->centre[static_cast<std::size_t>(d)];
        return sum * params.scale;
    }
    Unit unit(int number) const {
        const int head = units.head_of(number);
        return split.unit(head, number - units.first_unit(head), total(head));
    }
    // Returns what the rows of an observed band gave to the entries of a head.
    float* observed(int head, int band) const {
        return observations.row(layer, head * step.observed_bands(split) + band);
    }
    // Returns the largest shares of attention that the echo's rows in an observed band gave to the
    // entries of a head.
    float* echo_shares(int head, int band) const {
        const int bands = step.observed_bands(split);
        return observations.row(layer, (shape().n_head_kv + head) * bands + band);
    }
    // Combines a head's observed bands into the first one, so it must be called only once. Returns
    // what the whole observation window gave to every entry; null: nothing was observed.
    float* sum_observed(int head) const {
        if (!step.observing) return nullptr;
        const int bands = step.observed_bands(split);
        return observations.sum(layer, head * bands, bands, total(head));
    }
    // Combines a head's bands of an echo into the first one. Returns the largest share that the
    // echo's queries gave to every entry; null: no echo is observed.
    float* max_echo_shares(int head) const {
        if (!step.observing_echo) return nullptr;
        const int bands = step.observed_bands(split);
        return observations.largest(layer, (shape().n_head_kv + head) * bands, bands, total(head));
    }
};

class HeadAttention {
public:
    explicit HeadAttention(const AttentionCall& call)
        : call_(call), split_(call.split), step_(call.step), worker_(call.worker) {}

    // Attends with the rows of a unit. upcoming: the next unit of the thread, whose first entries
    // the decode kernel prefetches; -1: none.
    void run(const Unit& unit, int upcoming) noexcept;
    // merge() and merge_and_commit() are called for a head whose units are done. merge() merges
    // their partial results, writes the outputs, and observes what the queries gave to the entries;
    // merge_and_commit() also commits the head, or has it committed.
    void merge(int head) noexcept;
    void merge_and_commit(int head) noexcept;

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }

    void attend_rows(const RowTile& tile, int chunk) noexcept;
    void attend_token(const RowTile& tile, int chunk, int upcoming) noexcept;
    void load_queries(const RowTile& tile) noexcept;
    EntryRange stored_entries(int unit) const noexcept;
    PromptTask prompt_task(const RowTile& tile, const SoftmaxState& state) noexcept;
    template <typename Visit>
    void over_ranges(const RowTile& tile, int first, int last, Visit visit) noexcept;
    void start_softmax(const RowTile& tile, int chunk, const SoftmaxState& state) const noexcept;
    float sink_of(const RowTile& tile, int r) const noexcept;
    SoftmaxState partial(const RowTile& tile, int chunk) noexcept;
    SoftmaxState merge_tile(const RowTile& tile) noexcept;
    void merge_row(const RowTile& tile, int chunks, int r) noexcept;
    void write_output(const RowTile& tile, const SoftmaxState& state) noexcept;

    // The following functions add what the rows of a tile gave to the entries; `state` is final.
    void observe(const RowTile& tile, const SoftmaxState& state) noexcept;
    void observe_decode(const RowTile& tile, const SoftmaxState& state) noexcept;
    const float* weights_of(const RowTile& tile, int first, int end) noexcept;
    // Attention scores are computed again unless the attention weights were kept. weights: [rows];
    // what a row gives is multiplied by its weight.
    void add_observed(const RowTile& tile, const SoftmaxState& state, Statistic what,
                      const float* weights, float* observed) noexcept;

    float output_squares(int head) const noexcept;
    float* carry(int head) noexcept;
    float* carry_echo_shares(int head) noexcept;
    void commit(int head, const float* observed, const float* echo_shares) noexcept;
    void commit_layer() noexcept;

    const AttentionCall& call_;
    const Split& split_;
    const Step& step_;
    Worker& worker_;
};

}  // namespace entropykv
