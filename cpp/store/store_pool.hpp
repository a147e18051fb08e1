// Holds what sequences of one model share: the pages of a hard budget, of which each has a share,
// the staging area, predictors, and lessons. The shares never add up to more than the pool has. A
// store never owns more pages than its share, counting shared pages, too. So every shared page can
// be copied at any time, after checkpoints, which have no share, have been dropped.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "page/page_pool.hpp"
#include "platform/aligned_bytes.hpp"
#include "store/layer_shape.hpp"
#include "store/predictor.hpp"

namespace entropykv {

class Checkpoint;
class HeadStore;
class LessonSums;

// Holds the micro-batch of one layer while it is attended to (the staging area), in pages laid out
// like the pool's pages.
class Staging {
public:
    // Makes room for a micro-batch with max_tokens tokens of one sequence and single tokens of the
    // others, each of them followed by up to n_drafts drafts. page_bytes: the bytes of a page with
    // one of the layouts. all_layers: the micro-batch of all layers is staged at a time.
    Staging(const std::vector<LayerShape>& layers, const std::vector<PageLayout>& layouts,
            std::size_t page_bytes, int max_tokens, int n_sequences, int n_drafts,
            bool all_layers = false);

    // Returns the pages of a KV head. Each sequence uses some of them, starting with a page of its
    // own.
    std::byte* const* row(std::size_t layer, int head) const {
        return pages_.data() + (first_row_[layer] + static_cast<std::size_t>(head)) * row_pages_;
    }
    std::size_t row_pages() const { return row_pages_; }
    // Returns how many pages of a row n_tokens tokens of a sequence take.
    std::size_t pages_of(int n_tokens) const;
    // Returns how many drafts of a sequence there is room for beside those of all others.
    int n_drafts() const { return n_drafts_; }
    // Returns how many pages at the start of a row keep single tokens until the next layer is done.
    std::size_t single_pages() const { return single_pages_; }

    std::size_t bytes() const { return memory_.size(); }

private:
    int least_entries_;  // fewest entries that a page has in any layer
    int n_drafts_;
    std::size_t single_pages_;
    std::size_t row_pages_;
    std::vector<std::size_t> first_row_;  // number of the first row of each layer
    std::vector<std::byte*> pages_;
    AlignedBytes memory_;
};

class StorePool {
public:
    // Makes the pool of a single store: its budget is always the store's share.
    StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens,
              bool stages_all_layers = false);
    // Makes a pool for up to n_sequences sequences, each with up to n_drafts drafts at a time;
    // set_pages() sets its budget. Both throw std::invalid_argument for impossible numbers.
    StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens, int n_sequences,
              int n_drafts = 0);

    PagePool& pages() { return pages_; }
    const PagePool& pages() const { return pages_; }
    const Staging& staging() const { return staging_; }
    PredictorWeights& predictor() { return predictor_; }
    const PredictorWeights& predictor() const { return predictor_; }
    // Holds training data for the predictor. There is no lock, since only one sequence of a step
    // has an echo.
    std::shared_ptr<LessonSums> lessons{};
    bool collects_lessons = false;
    std::size_t prediction_bytes() const;
    std::size_t shared_pages() const { return shared_pages_; }

    // Sets how many pages the pool has. If it shrinks, checkpoints are dropped until the used pages
    // fit, and memory goes back to the system. Throws std::invalid_argument if the shares need more
    // pages or memory has no addresses for them, and std::logic_error if more stay in use.
    void set_pages(std::size_t pages);

    // Takes pages from a mapped file: see PagePool::adopt(). If free pages between those in use
    // prevent that, those in use are first moved together.
    std::byte* adopt(const std::shared_ptr<MappedFile>& file, std::size_t pages,
                     const std::vector<std::size_t>& unused);

    // Sets what is called between micro-batches when a store needs pages: it frees some, and
    // returns whether there were any. It may throw.
    void on_full(std::function<bool()> free_pages) { free_pages_ = std::move(free_pages); }
    // Has pages freed until as many are free as needed() returns, which may change meanwhile.
    // Returns whether they are free; allocating them cannot fail then. Throws what the function of
    // on_full() throws, and std::bad_alloc if the system has no memory.
    template <typename Needed>
    bool make_room(Needed needed) {
        while (pages_.budget_pages() - pages_.used_pages() < needed())
            if (!free_pages_ || !free_pages_()) return false;
        pages_.map(pages_.used_pages() + needed());
        return true;
    }
    // Throws std::logic_error where make_room() returns false: for copies that are made by
    // functions which may not throw.
    template <typename Needed>
    void require_room(Needed needed) {
        if (!make_room(needed))
            throw std::logic_error("checkpoints that nothing may drop hold the pool's last pages");
    }

    // Stores call the following functions; `before` is the store's present share. check_share()
    // throws std::invalid_argument if the other shares do not leave `pages` pages.
    void check_share(std::size_t before, std::size_t pages) const;
    void set_share(std::size_t before, std::size_t pages);
    void join(HeadStore& store) { stores_.push_back(&store); }
    void leave(HeadStore& store, std::size_t share);
    void join(Checkpoint& checkpoint) { checkpoints_.push_back(&checkpoint); }
    void leave(Checkpoint& checkpoint);

private:
    StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens, int n_sequences,
              int n_drafts, bool is_private, bool stages_all_layers);

    void compact();

    PagePool pages_;
    Staging staging_;
    PredictorWeights predictor_;
    bool is_private_;
    std::size_t shared_pages_ = 0;
    std::vector<HeadStore*> stores_;
    std::vector<Checkpoint*> checkpoints_;
    std::function<bool()> free_pages_;
};

// Counts how many pages of a pool one store may use, and how many it does use.
class PageShare {
public:
    explicit PageShare(std::shared_ptr<StorePool> pool) : pool_(std::move(pool)) {}
    PageShare(const PageShare&) = delete;
    PageShare& operator=(const PageShare&) = delete;

    StorePool& pool() { return *pool_; }
    const StorePool& pool() const { return *pool_; }
    const std::shared_ptr<StorePool>& shared_pool() const { return pool_; }

    // Allocates a page. Throws std::logic_error if the pool has none left.
    std::byte* take();
    void release(std::byte* page);
    // Takes the pages that a mapped file begins with: see PagePool::adopt().
    std::byte* adopt(const std::shared_ptr<MappedFile>& file, std::size_t pages,
                     const std::vector<std::size_t>& unused);
    // Counts pages that a head took over from a checkpoint; call note_peak() after it has evicted.
    void add_used(std::size_t pages) { used_ += pages; }
    void note_peak();
    // Returns a page with the same contents that has no other owner: a copy, or the page itself if
    // the other owners have left it. Throws like take().
    std::byte* own(std::byte* page, std::size_t bytes);
    bool is_shared_page(const std::byte* page) const { return pool_->pages().is_shared(page); }

    // Throws std::invalid_argument if the other shares do not leave `pages` pages.
    void check(std::size_t pages) const { pool_->check_share(budget_, pages); }
    void set(std::size_t pages);

    std::size_t used() const { return used_; }
    std::size_t budget() const { return budget_; }
    std::size_t page_bytes() const { return pool_->pages().page_bytes(); }
    std::size_t budget_bytes() const { return budget_ * page_bytes(); }
    std::size_t used_bytes() const { return used_ * page_bytes(); }
    std::size_t peak_bytes() const { return peak_ * page_bytes(); }

private:
    std::byte* allocate();

    std::shared_ptr<StorePool> pool_;
    std::size_t budget_ = 0;
    std::size_t used_ = 0;
    std::size_t peak_ = 0;
};

}  // namespace entropykv
