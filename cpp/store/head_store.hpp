// What every KV head of a sequence keeps: heads of entries in pages of one pool, in a hard budget.
// A micro-batch of one layer is staged, attended to, and committed: what the budget does not hold
// goes. See StoreParts for what it is made of. What else works on that: FrozenHeads freezes and
// restores, HeadSaver and HeadLoader go to files, forks.hpp shares pages, losses.hpp measures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "store/frozen_heads.hpp"

namespace entropykv {

class HeadStore {
public:
    // pool: which sequences of the same layers share; none: the store has one of its own, whose
    // budget is the store's.
    HeadStore(const std::vector<LayerShape>& layers, const StoreSettings& settings,
              std::shared_ptr<StorePool> pool = nullptr);
    ~HeadStore();
    HeadStore(const HeadStore&) = delete;
    HeadStore& operator=(const HeadStore&) = delete;

    StoreParts& parts() { return parts_; }
    const StoreParts& parts() const { return parts_; }
    const StoreSettings& settings() const { return parts_.common.settings; }
    const PageShare& share() const { return parts_.share; }
    int n_layers() const { return static_cast<int>(parts_.layers.size()); }
    const LayerShape& shape(int layer) const {
        return parts_.layers[PageLayout::index(layer)].shape;
    }
    const PageLayout& layout(int layer) const {
        return parts_.layers[PageLayout::index(layer)].layout;
    }
    const Head& head(int layer, int head) const { return parts_.head(layer, head); }

    void set_workers(int n_workers, const KernelTable& kernels);
    // Budgets in entries of every KV head, all layers in order, in a share of `pool_pages` pages.
    // Heads that hold more evict at once; where the pool is the store's own, it has no more than
    // the share, and freed slabs go back to the system.
    void set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                     const Protection& protection);
    // Gives the share back: nothing may be held. The next set_budgets() takes another one.
    void give_up_share();

    // Before every micro-batch, which ends at position `newest`: pages for all that it can leave
    // behind. Nothing after it allocates.
    // recalls: recall() will be called for every head. n_echo: tokens behind them, of which only
    // the queries count; then n_tokens may be 0.
    void reserve(int n_tokens, std::int32_t newest, bool recalls, int n_echo = 0);
    // Where in the staging area its part of the next micro-batch begins: see Staging.
    void stage_at(std::size_t page) { first_staged_page_ = page; }
    // The micro-batch's entries of one head, staged in the layout of the pool's pages: until the
    // next layer's, a single token until the one after that, or where a layer has several readers,
    // until the next micro-batch.
    std::byte* const* staging(int layer, int head) const {
        return share().pool().staging().row(PageLayout::index(layer), head) + first_staged_page_;
    }

    // Before a head is attended to: exchanges frozen entries that the queries need for the least
    // important ones that it holds. now: the newest position of the micro-batch. Called from ggml's
    // threads, each head by one thread; workspace < n_workers.
    void recall(int layer, int head, int n_staged, const QueryRows& queries, std::int32_t now,
                int workspace) noexcept;
    // For scores by expected attention, with the queries of a KV head: see QueryFollower.
    template <typename Row>
    void add_queries(int layer, int head, int n_tokens, float scale, Row row) noexcept {
        parts_.queries.add(parts_.head(layer, head), n_tokens, scale, row);
    }
    // After the attention of the last reader: adds `observed` (count + n_staged values, stored
    // entries first; null where nothing was) to the importance, and keeps what the budget holds of
    // stored and staged entries. As recall(). output_squares: the sum of the squared norms of the
    // head's outputs, where it measures. looked_up: the largest share that a query of an echo gave
    // to each of the same entries; null where there was none, or nothing is predicted.
    void commit(int layer, int head, int n_staged, const float* observed, const float* looked_up,
                float output_squares, int workspace) noexcept;

    // Drops entries at positions >= position, frozen ones too.
    void truncate(std::int32_t position);
    // Entries that left the window of their layer are dropped before any other, and not counted as
    // evicted. Queries at this position or later see none of those that were.
    std::int32_t windows_whole_from() const {
        return parts_.common.whole_from.load(std::memory_order_relaxed);
    }

    std::size_t entries() const;
    std::size_t evicted() const { return parts_.common.evicted.load(std::memory_order_relaxed); }
    FrozenFigures frozen() const { return FrozenFigures(parts_); }

private:
    StoreParts parts_;
    std::size_t first_staged_page_ = 0;
};

}  // namespace entropykv
