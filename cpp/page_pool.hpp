// Pages from one pool whose byte size is the KV budget. Memory comes from the system in slabs, as
// it is needed, and goes back to it when the budget shrinks.
#pragma once

#include <cstddef>
#include <vector>

#include "mapped_memory.hpp"

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

    // Compaction after a shrink: relocate every page in use (it returns where the page is now; the
    // caller updates its table), then trim the slabs that became empty.
    std::byte* relocate(std::byte* page);
    void trim();

    std::size_t page_bytes() const { return page_bytes_; }
    std::size_t budget_bytes() const { return budget_pages_ * page_bytes_; }
    std::size_t used_bytes() const { return used_pages_ * page_bytes_; }
    std::size_t peak_bytes() const { return peak_pages_ * page_bytes_; }
    std::size_t mapped_bytes() const;

private:
    struct Slab {
        MappedMemory memory;
        std::size_t pages;
    };

    void add_slab();
    bool holds(const Slab& slab, const std::byte* page) const;
    std::size_t slab_of(const std::byte* page) const;

    std::size_t page_bytes_;
    std::size_t budget_pages_;
    std::size_t used_pages_ = 0;
    std::size_t peak_pages_ = 0;
    std::size_t mapped_pages_ = 0;
    std::vector<Slab> slabs_;
    std::vector<std::byte*> free_;
};

}  // namespace entropykv
