// What every KV head keeps: paged entries per (layer, KV head) in one pool, and the staging area
// that holds one micro-batch of one layer while it is attended to. Entries are in no order within
// a head; each knows its position.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "eviction.hpp"
#include "importance.hpp"
#include "kernels.hpp"
#include "page_layout.hpp"
#include "page_pool.hpp"
#include "query_statistics.hpp"

namespace entropykv {

struct LayerShape {
    int n_head;     // query heads
    int n_head_kv;  // KV heads
    int k_dim;
    int v_dim;
};

struct StoreSettings {
    KvType type = KvType::f16;
    ImportanceSettings importance;
    Protection protection{4, 1};
    bool own_windows = false;         // every head's recent window is half of its own budget
    int max_tokens = 512;             // largest micro-batch
    int max_entries = 0;              // no KV head ever keeps more (the context)
    std::vector<RopeParams> ropes{};  // of the layers; none: keys and queries have no position
};

// Entries of one KV head as attention reads them, positions ascending.
struct StoredRows {
    std::vector<std::int32_t> positions;
    std::vector<float> importance;
    std::vector<float> k;  // [entries][k_dim]
    std::vector<float> v;  // [entries][v_dim]
};

// The K row of an entry, k_dim values.
void load_k(const PageLayout& layout, const std::byte* page, int slot, float* out);

constexpr int kLeastMeasured = 32;  // fewer queries say little

constexpr int kPageEntries = 16;  // of the layer with the largest entries

// Pages have the same bytes in every layer; a layer with smaller entries has more of them in one.
std::size_t pool_page_bytes(const std::vector<LayerShape>& layers, KvType type);
std::vector<PageLayout> page_layouts(const std::vector<LayerShape>& layers, KvType type);

class HeadStore {
public:
    HeadStore(const std::vector<LayerShape>& layers, const StoreSettings& settings);

    int n_layers() const { return static_cast<int>(layers_.size()); }
    const LayerShape& shape(int layer) const { return layers_[index(layer)].shape; }
    const PageLayout& layout(int layer) const { return layers_[index(layer)].layout; }
    int count(int layer, int head) const { return head_at(layer, head).count; }
    int budget(int layer, int head) const { return head_at(layer, head).budget; }
    const std::byte* const* pages(int layer, int head) const {
        return head_at(layer, head).pages.data();
    }
    const StoreSettings& settings() const { return settings_; }

    // Budgets in entries of every KV head, all layers in order; the pool gets `pool_pages` pages.
    // Heads that hold more evict at once, and freed slabs go back to the system.
    void set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                     const Protection& protection);

    // Before every micro-batch: pages for all that it can leave behind. Nothing after it allocates.
    void reserve(int n_tokens);

    // The micro-batch's entries of one head, staged in the layout of the pool's pages.
    std::byte* const* staging(int head) const {
        return staging_pages_.data() + static_cast<std::size_t>(head) * staging_stride_;
    }

    // After attention: adds `observed` (count + n_staged values, stored entries first; null where
    // nothing was) to the importance, and keeps what the budget holds of stored and staged
    // entries. Called from ggml's threads, each head by one thread; workspace < max_workers().
    // output_squares: the sum of the squared norms of the head's outputs, where it measures.
    void commit(int layer, int head, int n_staged, const float* observed, float output_squares,
                int workspace) noexcept;
    void set_workers(int n_workers, const KernelTable& kernels);

    // Has every micro-batch of kLeastMeasured tokens or more measure what each head would have
    // lost, had it kept so many entries beyond the protected ones; knots: ascending from 0, none:
    // off.
    void measure_losses(const std::vector<int>& knots);
    bool measures(int n_tokens) const { return !knots_.empty() && n_tokens >= kLeastMeasured; }
    // Of the last micro-batch that measured: sums of the scores of what is not kept, relative to
    // `output_squares` where scores are squared outputs; [KV head of all layers][knot].
    std::vector<double> losses() const;
    // For scores by expected attention: before a micro-batch that RoPE sees at `rope_position`, and
    // before commit(), with the queries of a KV head: row(token, query head of the group).
    void prepare_queries(std::int32_t rope_position, int n_tokens);
    template <typename Row>
    void add_queries(int layer, int head, int n_tokens, float scale, Row row) noexcept;

    // Drops entries at positions >= position.
    void truncate(std::int32_t position);

    std::vector<std::int32_t> positions(int layer, int head) const;  // ascending
    std::vector<float> importance(int layer, int head) const;        // of positions(), in order
    StoredRows rows(int layer, int head) const;

    // The entries of a head as bytes: see head_state.cpp.
    std::size_t state_bytes(int layer, int count) const;
    void save_head(int layer, int head, std::byte* state) const;
    // What is wrong with the state of a sequence of `end` tokens, or nothing.
    std::string state_problem(int layer, int count, const std::byte* state, std::size_t size,
                              std::int32_t end) const;
    // Pages for so many entries of every head, or of its budget: load_head() allocates no more.
    void begin_load(const std::vector<int>& counts);
    // Replaces a head's entries by those of a state without problems; changes the state where it
    // holds more than the head's budget, and evicts as set_budgets() does.
    void load_head(int layer, int head, int count, std::byte* state);
    void set_evicted(std::size_t entries) { evicted_.store(entries, std::memory_order_relaxed); }
    // visit(page, slot) for every stored entry of a layer's heads.
    template <typename Visit>
    void over_entries(int layer, Visit visit) {
        const int per_page = layout(layer).entries;
        for (Head& head : layers_[index(layer)].heads)
            for (int i = 0; i < head.count; ++i)
                visit(head.pages[index(i / per_page)], i % per_page);
    }

    std::size_t entries() const;
    std::size_t evicted() const { return evicted_.load(std::memory_order_relaxed); }
    double eviction_seconds() const {
        return 1e-9 * static_cast<double>(eviction_nanoseconds_.load(std::memory_order_relaxed));
    }
    std::size_t budget_bytes() const { return pool_.budget_bytes(); }
    std::size_t used_bytes() const { return pool_.used_bytes(); }
    std::size_t peak_bytes() const { return pool_.peak_bytes(); }
    std::size_t mapped_bytes() const { return pool_.mapped_bytes(); }
    std::size_t page_bytes() const { return pool_.page_bytes(); }
    std::size_t staging_bytes() const { return staging_.size(); }

private:
    struct Head {
        std::vector<std::byte*> pages;
        int count = 0;
        int budget = 0;
        std::vector<float> losses;  // at knots_
        QueryStatistics queries{};  // of its group, where scores need them
    };
    struct Layer {
        LayerShape shape;
        PageLayout layout;
        std::vector<Head> heads;
        std::size_t turns = 0;  // of its rope
    };
    struct Workspace {  // of one thread, for one commit
        std::vector<std::int32_t> positions;
        std::vector<float> scores;
        std::vector<float> scratch;
        std::vector<float> of_page;
        std::vector<float> mean;  // of expected queries
        std::vector<float> half_variance;
        std::vector<std::int32_t> order;
        std::vector<float> keys;  // [k_dim][kContest]
        std::vector<std::uint8_t> kept;
    };
    struct Slot {
        std::byte* page;
        int index;
    };

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    const Head& head_at(int layer, int head) const {
        return layers_.at(index(layer)).heads.at(index(head));
    }
    static Slot stored_slot(const Layer& layer, const Head& head, int i);
    Slot staged_slot(const Layer& layer, int head, int i) const;

    template <typename Visit>
    void over_pages(const Layer& layer, const Head& head, int head_index, int n_staged,
                    Visit visit) const;
    void add_observed(const Layer& layer, const Head& head, int head_index, int n_staged,
                      const float* observed) noexcept;
    std::int32_t gather(const Layer& layer, const Head& head, int head_index, int n_staged,
                        Workspace& workspace) const noexcept;
    float score_of(std::int32_t position, std::int32_t newest, float importance) const noexcept;
    void weigh_by_values(const Layer& layer, const Head& head, int head_index, int n_staged,
                         Workspace& workspace) const noexcept;
    void follow_queries(Layer& layer, std::size_t number);
    void expect(const Layer& layer, const Head& head, int head_index, int n_staged,
                Workspace& workspace) const noexcept;
    void add_softmax(int n, Workspace& workspace) const noexcept;
    void weigh_by_distinctness(const Layer& layer, const Head& head, int head_index, int total,
                               int keep, std::int32_t newest, Workspace& workspace) const noexcept;
    std::int32_t score(const Layer& layer, const Head& head, int head_index, int n_staged, int keep,
                       Workspace& workspace) const noexcept;
    Protection protection_of(const Head& head) const {
        return settings_.own_windows ? settings_.protection.within(head.budget)
                                     : settings_.protection;
    }
    void measure(Head& head, int total, std::int32_t newest, float output_squares,
                 Workspace& workspace) const noexcept;
    void append(const Layer& layer, Head& head, int head_index, int n_staged) noexcept;
    void apply(const Layer& layer, Head& head, int head_index, int n_staged,
               const std::uint8_t* kept) noexcept;
    void keep_best(const Layer& layer, Head& head, int head_index, int n_staged, int keep,
                   Workspace& workspace) noexcept;
    void keep_scored(const Layer& layer, Head& head, int head_index, int n_staged, int keep,
                     std::int32_t newest, Workspace& workspace) noexcept;
    void grow_pages(const Layer& layer, Head& head, int entries);
    void drop_pages(const Layer& layer, Head& head, int entries);
    void compact_pool();

    StoreSettings settings_;
    std::vector<int> knots_;
    const KernelTable* kernels_ = nullptr;
    std::vector<Layer> layers_;
    PagePool pool_;
    std::vector<std::byte> staging_;
    std::vector<std::byte*> staging_pages_;
    std::size_t staging_stride_ = 0;
    std::vector<Workspace> workspaces_;
    std::vector<TurnsBack> turns_;    // one for every kind of rope
    std::int32_t rope_position_ = 0;  // of the micro-batch
    std::atomic<std::size_t> evicted_{0};
    std::atomic<std::int64_t> eviction_nanoseconds_{0};
};

template <typename Row>
void HeadStore::add_queries(int layer_index, int head_index, int n_tokens, float scale,
                            Row row) noexcept {
    const ImportanceSettings& importance = settings_.importance;
    if (importance.kind != ScoreKind::expected) return;
    const Layer& layer = layers_[index(layer_index)];
    QueryStatistics& queries = layers_[index(layer_index)].heads[index(head_index)].queries;
    const int group = layer.shape.n_head / layer.shape.n_head_kv;
    queries.start(decay_factor(importance.decay, n_tokens), rope_position_ + n_tokens - 1);
    float turned[kMaxHeadDim];
    for (int token = 0; token < n_tokens; ++token) {
        const float weight = decay_factor(importance.decay, n_tokens - 1 - token);
        queries.count(weight);
        for (int g = 0; g < group; ++g) {
            const float* query = row(token, g);
            for (int d = 0; d < layer.shape.k_dim; ++d) turned[d] = query[d] * scale;
            turns_[layer.turns].turn_back(token, turned);
            queries.add(g, turned, weight);
        }
    }
}

}  // namespace entropykv
