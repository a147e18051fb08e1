// What one store has of a pool's pages: how many it may use, and how many it does.
#pragma once

#include <cstddef>
#include <memory>

#include "store/store_pool.hpp"

namespace entropykv {

class PageShare {
public:
    explicit PageShare(std::shared_ptr<StorePool> pool) : pool_(std::move(pool)) {}
    PageShare(const PageShare&) = delete;
    PageShare& operator=(const PageShare&) = delete;

    StorePool& pool() { return *pool_; }
    const StorePool& pool() const { return *pool_; }
    const std::shared_ptr<StorePool>& shared_pool() const { return pool_; }

    // A page of one owner. Throws std::logic_error where there is none left.
    std::byte* take();
    void release(std::byte* page);
    // Pages that a head takes over from a checkpoint; note_peak() comes when it has evicted.
    void add_used(std::size_t pages) { used_ += pages; }
    void note_peak();
    // A page of its own with what is in one that others own, too; the same one where they have
    // left it.
    std::byte* own(std::byte* page, std::size_t bytes);
    bool is_foreign(const std::byte* page) const { return pool_->pages().is_shared(page); }

    // Throws std::invalid_argument where the other shares do not leave so many pages.
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
