// Holds what every KV head of a sequence keeps, in pages of a pool, within a hard budget. The
// micro-batch of one layer is staged, attended to, and committed, which evicts what the budget
// cannot hold. StoreComponents has the parts; FrozenHeads freezes and restores entries, HeadSaver
// and HeadLoader save and load them, and checkpoint.hpp shares pages with checkpoints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "store/frozen_heads.hpp"

namespace entropykv {

// Thrown if entries are lost, because someone has written to the file that has their pages.
struct MappedFileError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class HeadStore {
public:
    // pool: shared with other sequences of the same layers; null: the store has a pool of its own,
    // whose budget is that of the store.
    HeadStore(const std::vector<LayerShape>& layers, const StoreSettings& settings,
              std::shared_ptr<StorePool> pool = nullptr);
    ~HeadStore();
    HeadStore(const HeadStore&) = delete;
    HeadStore& operator=(const HeadStore&) = delete;

    StoreComponents& components() { return components_; }
    const StoreComponents& components() const { return components_; }
    const StoreSettings& settings() const { return components_.common.settings; }
    const PageShare& share() const { return components_.share; }
    int n_layers() const { return static_cast<int>(components_.layers.size()); }
    const LayerShape& shape(int layer) const {
        return components_.layers[PageLayout::index(layer)].shape;
    }
    const PageLayout& layout(int layer) const {
        return components_.layers[PageLayout::index(layer)].layout;
    }
    const Head& head(int layer, int head) const { return components_.head(layer, head); }

    void set_workers(int n_workers, const KernelTable& kernels);
    // Sets the budgets in entries of every KV head, layer by layer, and the store's share of the
    // pool in pages. Heads that hold more evict at once. A pool that only this store uses shrinks
    // to the share, and returns free memory to the system. Throws std::invalid_argument for
    // impossible budgets, and what ColdHead::prepare() throws.
    void set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                     const Protection& protection);
    // Gives the share back to the pool; the next set_budgets() takes one again. Throws
    // std::logic_error if the store holds pages.
    void give_up_share();

    // Must be called before every micro-batch, whose last position is `newest`. Reserves pages for
    // all entries that the micro-batch may leave behind, so that nothing later allocates. recalls:
    // recall() will be called for every head. n_echo: tokens of an echo behind the n_tokens, which
    // may then be 0. The last n_drafts of the n_tokens are drafts: see commit_token() and
    // settle_drafts(). Throws std::invalid_argument for impossible numbers of tokens,
    // std::logic_error if the pool has no pages left, and what ColdHead::prepare() throws.
    void reserve(int n_tokens, std::int32_t newest, bool recalls, int n_echo = 0, int n_drafts = 0);
    // Returns how many drafts may follow the next token, at most `wanted`: none where commits
    // cannot be undone (entries freeze, losses are measured, or a layer has several readers), and
    // fewer where a layer with a window would evict.
    int most_drafts(int wanted) const;
    // Sets where this store's part of the staging area begins in the next micro-batch: see Staging.
    void stage_at(std::size_t page) { first_staged_page_ = page; }
    // Returns the pages of one head's staged entries, which have the layout of the pool's pages.
    // The pages stay valid until the next layer is staged; for a single token, one layer longer;
    // for a layer with several readers, until the next micro-batch.
    std::byte* const* staging(int layer, int head) const {
        return share().pool().staging().row(PageLayout::index(layer), head) + first_staged_page_;
    }

    // Called before a head is attended to: exchanges its least important entries for frozen ones
    // that the queries need. now: the newest position of the micro-batch. ggml's threads call this,
    // one thread per head; `workspace` is the number of the thread.
    void recall(int layer, int head, int n_staged, const QueryRows& queries, std::int32_t now,
                int workspace) noexcept;
    // Called after the last reader has attended, by one thread per head like recall(). Adds
    // `observed` to the importance of the entries (count + n_staged values, stored entries first;
    // null: nothing was observed), then stores the staged entries and evicts what exceeds the
    // budget. echo_shares: the largest share that a query of an echo gave to each entry, or null.
    // output_squares: the sum of the squared norms of the head's outputs, if losses are measured.
    void commit(int layer, int head, int n_staged, const float* observed, const float* echo_shares,
                float output_squares, int workspace) noexcept;

    // Adds to the importance what the queries of n_queries single tokens gave to the stored
    // entries, after these tokens were committed with a null `observed`, and before anything is
    // evicted. `sum` has what commit() would have added: each query counts for kScoringInterval
    // tokens, what earlier queries gave has decayed, and a query gives nothing to its
    // neighbourhood.
    void add_sum(int layer, int head, int n_queries, const float* sum, int workspace) noexcept;

    // Commits one staged token of a run with drafts, as if it had been read alone. token: its
    // number in the run, whose first token is no draft; position: its position. Tokens of a head
    // are committed in order, by one thread. observed: as for commit().
    void commit_token(int layer, int head, int token, std::int32_t position, const float* observed,
                      int workspace) noexcept;
    // Undoes the commits of all drafts of the last micro-batch but the first n_accepted. Must be
    // called after every micro-batch that had drafts. Throws std::invalid_argument for a negative
    // number.
    void settle_drafts(int n_accepted);

    // Throws MappedFileError if entries are in the pages of a file that someone has changed.
    void check_files();

    // Drops entries at positions >= position, including frozen ones. Throws std::invalid_argument
    // for a negative position.
    void truncate(std::int32_t position);
    // Entries that have left the window of their layer are dropped before any others, and not
    // counted as evicted. Returns the first position whose query needs none of those dropped
    // entries: a rollback may go back to there.
    std::int32_t windows_whole_from() const {
        return components_.common.whole_from.load(std::memory_order_relaxed);
    }

    std::size_t entries() const;
    std::size_t evicted() const {
        return components_.common.evicted.load(std::memory_order_relaxed);
    }
    FrozenFigures frozen() const { return FrozenFigures(components_); }

private:
    StoreComponents components_;
    std::size_t first_staged_page_ = 0;
};

}  // namespace entropykv
