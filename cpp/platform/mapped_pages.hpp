// Holds an array of pages of one size, in memory straight from the system. The pages lie in few
// large ranges of addresses, because the system limits the number of ranges, and are numbered from
// 0. A range can be a mapped file, which begins with an array of such pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "platform/mapped_file.hpp"

namespace entropykv {

class MappedPages {
public:
    static constexpr std::size_t kMostPages = std::size_t{1} << 31;

    explicit MappedPages(std::size_t page_bytes) : page_bytes_(page_bytes) {}

    // Maps memory for at least `pages` pages in all, and for up to a slab more if there will soon
    // be `expected` pages in all. Throws std::bad_alloc, and then changes nothing.
    void grow(std::size_t pages, std::size_t expected);
    // Gives the memory behind the first `pages` pages back to the system.
    void shrink(std::size_t pages) noexcept;

    // Keeps the first `first` pages, and appends the `pages` pages of a file, all of them in use.
    // Throws std::bad_alloc, and then changes nothing.
    void append_file(const std::shared_ptr<MappedFile>& file, std::size_t first, std::size_t pages);
    // Note that a page is in use, or free, or that exactly the first `pages` pages are in use. Once
    // no page of a file is in use, its range becomes memory like any other, so that nothing of a
    // deleted file stays on the disk.
    void note_used(std::size_t number) noexcept;
    void note_free(std::size_t number) noexcept;
    void note_first_used(std::size_t pages) noexcept;
    bool is_in_file(std::size_t number) noexcept { return file_of(number) != nullptr; }
    // Tell whether someone has changed a mapped file, and whether a page belongs to such a file.
    bool any_file_changed() noexcept;
    bool is_changed(const std::byte* page);

    std::size_t count() const { return count_; }  // pages that have memory
    std::size_t bytes() const;                    // of the memory of all ranges
    std::byte* at(std::size_t number) const;
    // Returns the number of the page at an address. Throws std::logic_error if there is none.
    std::size_t number_of(const std::byte* page) const;

private:
    struct Range {
        MappedMemory own;
        std::size_t first;                   // number of the range's first page
        std::size_t capacity;                // pages that the range can hold
        std::shared_ptr<MappedFile> file{};  // owns the memory in the place of `own`
        std::size_t n_used = 0;              // pages of the file that are in use

        MappedMemory& memory() { return file ? file->memory() : own; }
        const MappedMemory& memory() const { return file ? file->memory() : own; }
        std::size_t end() const { return first + capacity; }
    };

    static std::size_t next_range_bytes(std::size_t wanted, std::size_t reserved);
    void add_range(std::size_t wanted_pages);
    void grow_last(std::size_t pages, std::size_t expected);
    void recount();
    void insert_by_address();
    const Range& range_of(std::size_t number) const;
    Range* file_of(std::size_t number) noexcept;

    std::size_t page_bytes_;
    std::size_t count_ = 0;
    std::vector<Range> ranges_{};              // in the order of their pages
    std::vector<std::uint32_t> by_address_{};  // numbers of ranges, sorted by address
    std::size_t n_files_ = 0;                  // ranges that were files when appended
};

}  // namespace entropykv
