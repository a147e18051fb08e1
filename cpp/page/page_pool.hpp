// Defines a pool of pages whose total size is the KV budget. Memory is taken from the system as it
// is needed, and given back by compact(). A page may have several owners: it counts once, and is
// free when the last owner has released it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "platform/mapped_pages.hpp"

namespace entropykv {

class PagePool {
public:
    PagePool(std::size_t page_bytes, std::size_t budget_pages)
        : pages_(page_bytes), page_bytes_(page_bytes), budget_pages_(budget_pages) {}
    PagePool(const PagePool&) = delete;
    PagePool& operator=(const PagePool&) = delete;

    // Returns a page with one owner, or nullptr if the budget is used up. Throws std::bad_alloc if
    // the system has no memory, and then changes nothing.
    std::byte* allocate();
    // Adds an owner. While a page has several, none may write to it.
    void share(const std::byte* page) { ++owners_of(page); }
    bool is_shared(const std::byte* page) const { return owners_[pages_.number_of(page)] > 1; }
    // Takes the pages that a mapped file begins with, each with one owner, and returns the first
    // one. They are pages like any other, but share memory with other processes until they are
    // written to. unused: the numbers of the file's pages that hold something else, and are free
    // from the start. Returns null if all pages are unused, or if the budget has no room for the
    // used ones behind the pages that the pool has so far. Throws std::bad_alloc. If it returns
    // null or throws, no page in use has changed.
    std::byte* adopt(const std::shared_ptr<MappedFile>& file, std::size_t pages,
                     const std::vector<std::size_t>& unused);
    // Tell whether someone has changed a file that was adopted, and whether a page is affected.
    bool any_file_changed() noexcept { return pages_.any_file_changed(); }
    bool is_changed(const std::byte* page) { return pages_.is_changed(page); }
    // Removes an owner; without any, the page is free.
    void release(std::byte* page);
    // Maps memory for `pages` pages in all, at most the budget, so that allocate() does not throw
    // until more are in use. Throws std::bad_alloc.
    void map(std::size_t pages);

    // Sets how many pages there may be. Throws std::logic_error if more are in use.
    void set_budget(std::size_t pages);

    // Moves pages in use to the first places after the budget shrank, and gives the memory behind
    // them back to the system. for_each_page(relocate) must call relocate(page) once for every
    // owner of a page, and store the address that it returns. The cost is proportional to the
    // number of pages, times the logarithm of the number of address ranges. Does not allocate. If a
    // page is not from this pool, throws std::logic_error, and gives nothing back.
    template <typename OverPages>
    void compact(OverPages for_each_page) {
        free_.insert(free_.end(), free_in_files_.begin(), free_in_files_.end());
        free_in_files_.clear();
        const std::size_t n_room = gather_room();
        std::size_t n_taken = 0;
        for_each_page([&](std::byte* page) { return relocate(page, n_taken, n_room); });
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
    // Marks a page that was relocated; the number of its owners is replaced by its new place.
    static constexpr std::uint32_t kMoved = std::uint32_t{1} << 31;

    void make_lists(std::size_t pages);
    void add_page();
    void set_free(std::byte* page, std::size_t number);
    std::uint32_t& owners_of(const std::byte* page) { return owners_[pages_.number_of(page)]; }
    std::size_t gather_room();
    std::byte* relocate(std::byte* page, std::size_t& n_taken, std::size_t n_room);
    void keep_first();

    MappedPages pages_;
    std::size_t page_bytes_;
    std::size_t budget_pages_;
    std::size_t used_pages_ = 0;
    std::size_t peak_pages_ = 0;
    // Says how many owners each page has; the value is meaningless for free pages.
    std::vector<std::uint32_t> owners_{};
    // free_ has free pages in memory; free_in_files_ has free pages of mapped files, which are
    // handed out last: their content would be lost if the file was shortened.
    std::vector<std::byte*> free_{};
    std::vector<std::byte*> free_in_files_{};
};

}  // namespace entropykv
