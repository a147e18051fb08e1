// Pages from one pool whose byte size is the KV budget. Memory comes from the system in slabs, as
// it is needed, and goes back to it when the budget shrinks. A page may have several owners: it
// counts once, and is free when the last one has released it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "platform/mapped_memory.hpp"

namespace entropykv {

class PagePool {
public:
    PagePool(std::size_t page_bytes, std::size_t budget_pages);
    PagePool(const PagePool&) = delete;
    PagePool& operator=(const PagePool&) = delete;

    // A page of one owner, or nullptr when the budget is used up. Throws std::bad_alloc when the
    // system refuses.
    std::byte* allocate();
    // Adds an owner; none of several may write to the page.
    void share(const std::byte* page) { ++owners_of(page); }
    bool is_shared(const std::byte* page) const { return owners_of(page) > 1; }
    // Takes an owner away.
    void release(std::byte* page);
    // Has the system give memory for so many pages: allocate() does not fail then.
    void map(std::size_t pages);

    // Throws std::logic_error when more pages than that are in use.
    void set_budget(std::size_t pages);

    // After a shrink: moves pages in use into the first slabs that hold all of them, and gives the
    // other slabs back to the system. over_pages(relocate) calls relocate(page) once for every
    // owner of a page, and takes the address that it returns. Its cost grows with the pages (times
    // the logarithm of the slabs), not with their products. Throws std::logic_error for a page that
    // is not of this pool, and then nothing was given back.
    template <typename OverPages>
    void compact(OverPages over_pages) {
        const std::size_t n_kept = slabs_of_used_pages();
        Moves moves{n_kept, free_pages_of(n_kept), {}};
        over_pages([&](std::byte* page) { return relocate(page, moves); });
        keep_slabs(n_kept, std::move(moves.room));
    }

    std::size_t page_bytes() const { return page_bytes_; }
    std::size_t budget_bytes() const { return budget_pages_ * page_bytes_; }
    std::size_t budget_pages() const { return budget_pages_; }
    std::size_t used_pages() const { return used_pages_; }
    std::size_t used_bytes() const { return used_pages_ * page_bytes_; }
    std::size_t peak_bytes() const { return peak_pages_ * page_bytes_; }
    std::size_t mapped_bytes() const;

private:
    struct Slab {
        MappedMemory memory;
        std::size_t pages;
        std::vector<std::uint32_t> owners;  // of each page; of those that are free, any number
    };
    struct Moves {  // of one compaction
        std::size_t n_kept;
        std::vector<std::byte*> room;
        std::unordered_map<const std::byte*, std::byte*> shared;  // where they are now
    };

    void add_slab();
    std::size_t slab_of(const std::byte* page) const;
    std::size_t slabs_of_used_pages() const;
    std::vector<std::byte*> free_pages_of(std::size_t n_slabs) const;
    const std::uint32_t& owners_of(const std::byte* page) const;
    std::uint32_t& owners_of(const std::byte* page) {
        return const_cast<std::uint32_t&>(std::as_const(*this).owners_of(page));
    }
    std::byte* relocate(std::byte* page, Moves& moves);
    void keep_slabs(std::size_t n, std::vector<std::byte*> free);
    void sort_slabs();

    std::size_t page_bytes_;
    std::size_t budget_pages_;
    std::size_t used_pages_ = 0;
    std::size_t peak_pages_ = 0;
    std::size_t mapped_pages_ = 0;
    std::vector<Slab> slabs_;
    std::vector<std::uint32_t> by_address_;  // slabs in the order of their addresses
    std::vector<std::byte*> free_;
};

}  // namespace entropykv
