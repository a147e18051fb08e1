// Holds what sequences of one model share: the pages of a hard budget, of which each has a
// share, and the staging area. The shares never add up to more than the pool has. A store never
// owns more pages than its share, counting shared pages, too. Therefore every shared page can be
// copied at any time, after checkpoints, which have no share, have been dropped.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "page/page_pool.hpp"
#include "store/predictor.hpp"
#include "store/staging.hpp"

namespace entropykv {

class Checkpoint;
class HeadStore;
class LessonSums;

class StorePool {
public:
    // Makes the pool of a single store: its budget is always the store's share.
    StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens,
              bool stages_all_layers = false);
    // Makes a pool for up to n_sequences sequences; set_pages() sets its budget.
    // Each of them may read up to n_drafts drafts at a time.
    StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens, int n_sequences,
              int n_drafts = 0);

    PagePool& pages() { return pages_; }
    const PagePool& pages() const { return pages_; }
    const Staging& staging() const { return staging_; }
    // Returns the predictor of all sequences of the pool.
    PredictorWeights& predictor() { return predictor_; }
    const PredictorWeights& predictor() const { return predictor_; }
    // Training data for the predictor. No lock is needed, since only one sequence of a step has an
    // echo.
    std::shared_ptr<LessonSums> lessons{};
    bool collects_lessons = false;
    // Counts the bytes of the predictor and the lessons.
    std::size_t prediction_bytes() const;
    std::size_t shared_pages() const { return shared_pages_; }

    // Sets how many pages the pool has. If it shrinks, memory goes back to the system: see
    // mapped_bytes(). Throws std::invalid_argument if the shares need more pages.
    void set_pages(std::size_t pages);

    // Takes pages from a mapped file: see PagePool::adopt(). If pages that are free lie between
    // those in use, the latter are first moved together.
    std::byte* adopt(const std::shared_ptr<MappedFile>& file, std::size_t pages,
                     const std::vector<std::size_t>& unused);

    // Sets what is called between micro-batches when a store needs pages: drop() drops a
    // checkpoint, and returns whether there was one.
    void on_full(std::function<bool()> drop) { drop_checkpoint_ = std::move(drop); }
    // Drops checkpoints until as many pages are free as needed() returns, which may change with
    // every dropped checkpoint. Returns whether they are free; allocating them cannot fail then.
    // Throws std::bad_alloc if the system has no memory.
    template <typename Needed>
    bool make_room(Needed needed) {
        while (pages_.budget_pages() - pages_.used_pages() < needed())
            if (!drop_checkpoint_ || !drop_checkpoint_()) return false;
        pages_.map(pages_.used_pages() + needed());
        return true;
    }

    // Stores call the following functions. check_share() throws std::invalid_argument if the other
    // shares do not leave so many pages.
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
    std::function<bool()> drop_checkpoint_;
};

// The part of a pool that one store may use, and how many pages it does use.
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
    // the other owners have left it.
    std::byte* own(std::byte* page, std::size_t bytes);
    bool is_shared_page(const std::byte* page) const { return pool_->pages().is_shared(page); }

    // Throws std::invalid_argument if the other shares do not leave so many pages.
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
