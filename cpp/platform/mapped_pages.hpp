// An array of pages of one size, in memory straight from the system. The pages lie in few large
// ranges of addresses, because the system limits the number of ranges, and are numbered from 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "platform/mapped_memory.hpp"

namespace entropykv {

class MappedPages {
public:
    static constexpr std::size_t kMostPages = std::size_t{1} << 31;

    explicit MappedPages(std::size_t page_bytes) : page_bytes_(page_bytes) {}

    // Maps memory for at least so many pages, and up to a slab more if `expected` pages will
    // follow. Throws std::bad_alloc, and then changes nothing.
    void grow(std::size_t pages, std::size_t expected);
    // Gives the memory behind the first pages back to the system.
    void shrink(std::size_t pages) noexcept;

    std::size_t count() const { return count_; }  // pages that have memory
    std::size_t bytes() const;                    // counts the memory of all pages
    std::byte* at(std::size_t number) const;
    // Returns the number of the page at an address. Throws std::logic_error if there is none.
    std::size_t number_of(const std::byte* page) const;

private:
    struct Range {
        MappedMemory memory;
        std::size_t first;  // number of its first page
    };

    static std::size_t next_range_bytes(std::size_t wanted, std::size_t reserved);
    std::size_t capacity(const Range& range) const { return range.memory.reserved() / page_bytes_; }
    void add_range(std::size_t wanted_pages);
    void grow_last(std::size_t pages, std::size_t expected);
    void recount();

    std::size_t page_bytes_;
    std::size_t count_ = 0;
    std::vector<Range> ranges_{};              // are in the order of their pages
    std::vector<std::uint32_t> by_address_{};  // numbers of ranges, sorted by address
};

}  // namespace entropykv
