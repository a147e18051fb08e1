// Pages from one pool whose byte size is the KV budget. Memory comes from the system in slabs, as
// it is needed, and goes back to it when the budget shrinks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "platform/mapped_memory.hpp"

namespace entropykv {

class PagePool {
public:
    PagePool(std::size_t page_bytes, std::size_t budget_pages);
    PagePool(const PagePool&) = delete;
    PagePool& operator=(const PagePool&) = delete;

    // A page, or nullptr when the budget is used up. Throws std::bad_alloc when the system refuses.
    std::byte* allocate();
    void release(std::byte* page);
    // Has the system give memory for so many pages: allocate() does not fail then.
    void map(std::size_t pages);

    // Throws std::logic_error when more pages than that are in use.
    void set_budget(std::size_t pages);

    // After a shrink: moves pages in use into the first slabs that hold all of them, and gives the
    // other slabs back to the system. over_pages(relocate) calls relocate(page) once for every page
    // in use, and takes the address that it returns. Its cost grows with the pages (times the
    // logarithm of the slabs), not with their products. Throws std::logic_error for a page that is
    // not of this pool, and then nothing was given back.
    template <typename OverPages>
    void compact(OverPages over_pages) {
        sort_slabs();
        const std::size_t n_kept = slabs_of_used_pages();
        std::vector<std::byte*> room = free_pages_of(n_kept);
        over_pages([&](std::byte* page) { return relocate(page, n_kept, room); });
        keep_slabs(n_kept, std::move(room));
    }

    std::size_t page_bytes() const { return page_bytes_; }
    std::size_t budget_bytes() const { return budget_pages_ * page_bytes_; }
    std::size_t used_pages() const { return used_pages_; }
    std::size_t used_bytes() const { return used_pages_ * page_bytes_; }
    std::size_t peak_bytes() const { return peak_pages_ * page_bytes_; }
    std::size_t mapped_bytes() const;

private:
    struct Slab {
        MappedMemory memory;
        std::size_t pages;
    };

    void add_slab();
    std::size_t slab_of(const std::byte* page) const;
    std::size_t slabs_of_used_pages() const;
    std::vector<std::byte*> free_pages_of(std::size_t n_slabs) const;
    std::byte* relocate(std::byte* page, std::size_t n_kept, std::vector<std::byte*>& room) const;
    void keep_slabs(std::size_t n, std::vector<std::byte*> free);
    void sort_slabs();

    std::size_t page_bytes_;
    std::size_t budget_pages_;
    std::size_t used_pages_ = 0;
    std::size_t peak_pages_ = 0;
    std::size_t mapped_pages_ = 0;
    std::vector<Slab> slabs_;
    std::vector<std::uint32_t>
        by_address_;  // slabs in the order of their addresses, while pages move
    std::vector<std::byte*> free_;
};

}  // namespace entropykv
