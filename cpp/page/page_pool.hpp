// Pages from one pool whose byte size is the KV budget. Memory comes from the system as it is
// needed, and goes back to it when the budget shrinks. A page may have several owners: it counts
// once, and is free when the last one has released it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "platform/mapped_pages.hpp"

namespace entropykv {

class PagePool {
public:
    PagePool(std::size_t page_bytes, std::size_t budget_pages)
        : pages_(page_bytes), page_bytes_(page_bytes), budget_pages_(budget_pages) {}
    PagePool(const PagePool&) = delete;
    PagePool& operator=(const PagePool&) = delete;

    // A page of one owner, or nullptr when the budget is used up. Throws std::bad_alloc when the
    // system refuses, and nothing has changed.
    std::byte* allocate();
    // Adds an owner; none of several may write to the page.
    void share(const std::byte* page) { ++owners_of(page); }
    bool is_shared(const std::byte* page) const { return owners_[pages_.number_of(page)] > 1; }
    // Takes an owner away.
    void release(std::byte* page);
    // Has the system give memory for so many pages: while no more are in use, allocate() does not
    // fail. Throws std::bad_alloc.
    void map(std::size_t pages);

    // Throws std::logic_error when more pages than that are in use.
    void set_budget(std::size_t pages);

    // After a shrink: moves pages in use to the first places, and gives the memory behind them back
    // to the system. over_pages(relocate) calls relocate(page) once for every owner of a page, and
    // takes the address that it returns. Its cost grows with the pages (times the logarithm of the
    // ranges that they lie in), not with their products, and it allocates nothing. Throws
    // std::logic_error for a page that is not of this pool, and then nothing was given back.
    template <typename OverPages>
    void compact(OverPages over_pages) {
        const std::size_t n_room = gather_room();
        std::size_t n_taken = 0;
        over_pages([&](std::byte* page) { return relocate(page, n_taken, n_room); });
        keep_first();
    }

    std::size_t page_bytes() const { return page_bytes_; }
    std::size_t budget_bytes() const { return budget_pages_ * page_bytes_; }
    std::size_t budget_pages() const { return budget_pages_; }
    std::size_t used_pages() const { return used_pages_; }
    std::size_t used_bytes() const { return used_pages_ * page_bytes_; }
    std::size_t peak_bytes() const { return peak_pages_ * page_bytes_; }
    std::size_t mapped_bytes() const { return pages_.bytes(); }

private:
    // In place of the owners of a page that was relocated: where to.
    static constexpr std::uint32_t kMoved = std::uint32_t{1} << 31;

    void make_lists(std::size_t pages);
    std::uint32_t& owners_of(const std::byte* page) { return owners_[pages_.number_of(page)]; }
    std::size_t gather_room();
    std::byte* relocate(std::byte* page, std::size_t& n_taken, std::size_t n_room);
    void keep_first();

    MappedPages pages_;
    std::size_t page_bytes_;
    std::size_t budget_pages_;
    std::size_t used_pages_ = 0;
    std::size_t peak_pages_ = 0;
    // Of each page that was ever handed out; of those that are free, any number.
    std::vector<std::uint32_t> owners_{};
    std::vector<std::byte*> free_{};  // of these
};

}  // namespace entropykv
