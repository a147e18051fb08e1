#include "platform/mapped_pages.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>

namespace entropykv {
namespace {

// Ranges of this size are few even on a large machine, and no single request is so large that a
// system which counts reserved memory would refuse it.
constexpr std::size_t kRangeBytes = std::size_t{1} << 30;

}  // namespace

// Returns the bytes of a new range: those that are wanted, or as many as are reserved already, so
// that many small steps make few ranges.
std::size_t MappedPages::next_range_bytes(std::size_t wanted, std::size_t reserved) {
    return std::clamp(std::max(wanted, reserved), kSlabBytes, kRangeBytes);
}

void MappedPages::add_range(std::size_t wanted_pages) {
    ranges_.reserve(ranges_.size() + 1);
    by_address_.reserve(ranges_.size() + 1);
    std::size_t reserved = 0;
    for (const Range& range : ranges_) reserved += range.memory().reserved();
    const std::size_t wanted = std::min(wanted_pages, kRangeBytes / page_bytes_ + 1) * page_bytes_;
    const std::size_t first = ranges_.empty() ? 0 : ranges_.back().end();
    const auto add = [&](std::size_t bytes) {
        MappedMemory memory(bytes);
        const std::size_t capacity = memory.reserved() / page_bytes_;
        ranges_.push_back({std::move(memory), first, capacity});
    };
    try {
        add(std::max(next_range_bytes(wanted, reserved), page_bytes_));
    } catch (const std::bad_alloc&) {  // addresses may be limited, so reserve only what is needed
        add(page_bytes_);
    }
    insert_by_address();
}

// Enters the last range into the list that is sorted by address, which has room for it.
void MappedPages::insert_by_address() {
    const auto number = static_cast<std::uint32_t>(ranges_.size() - 1);
    const std::byte* data = ranges_.back().memory().data();
    const auto after = std::upper_bound(
        by_address_.begin(), by_address_.end(), data,
        [&](const std::byte* at, std::uint32_t i) { return at < ranges_[i].memory().data(); });
    by_address_.insert(after, number);
}

void MappedPages::append_file(const std::shared_ptr<MappedFile>& file, std::size_t first,
                              std::size_t pages) {
    ranges_.reserve(ranges_.size() + 1);
    by_address_.reserve(ranges_.size() + 1);
    shrink(first);
    if (!ranges_.empty()) {
        Range& last = ranges_.back();
        last.capacity = first - last.first;
        // Memory of the slab behind its last page would never be used.
        const std::size_t page = system_page_bytes();
        last.memory().shrink((last.capacity * page_bytes_ + page - 1) / page * page);
    }
    ranges_.push_back({MappedMemory(), first, pages, file, pages});
    insert_by_address();
    ++n_files_;
    recount();
}

MappedPages::Range* MappedPages::file_of(std::size_t number) noexcept {
    if (n_files_ == 0) return nullptr;
    Range& range = const_cast<Range&>(range_of(number));
    return range.file ? &range : nullptr;
}

void MappedPages::note_used(std::size_t number) noexcept {
    if (Range* range = file_of(number)) ++range->n_used;
}

void MappedPages::note_free(std::size_t number) noexcept {
    Range* range = file_of(number);
    if (range != nullptr && --range->n_used == 0) range->file->let_go();
}

void MappedPages::note_first_used(std::size_t pages) noexcept {
    for (Range& range : ranges_) range.n_used = std::min(range.end(), pages) - range.first;
}

bool MappedPages::any_file_changed() noexcept {
    bool any = false;
    for (Range& range : ranges_) any = (range.file && range.file->has_changed()) || any;
    return any;
}

bool MappedPages::is_changed(const std::byte* page) {
    Range* range = file_of(number_of(page));
    return range != nullptr && range->file->has_changed();
}

void MappedPages::grow(std::size_t pages, std::size_t expected) {
    if (pages > kMostPages) throw std::bad_alloc();
    expected = std::max(pages, expected);
    while (count_ < pages) {
        if (ranges_.empty() || count_ == ranges_.back().end()) add_range(expected - count_);
        grow_last(pages, expected);
    }
}

// Grows to the end of a slab, unless fewer pages are expected.
void MappedPages::grow_last(std::size_t pages, std::size_t expected) {
    Range& range = ranges_.back();
    const std::size_t needed = std::min(pages - range.first, range.capacity) * page_bytes_;
    const std::size_t most = std::min(expected - range.first, range.capacity) * page_bytes_;
    const std::size_t slabs = (needed + kSlabBytes - 1) / kSlabBytes * kSlabBytes;
    MappedMemory& memory = range.memory();
    memory.grow(std::min({slabs, mapped_size(most), memory.reserved()}));
    recount();
}

void MappedPages::shrink(std::size_t pages) noexcept {
    while (!ranges_.empty() && ranges_.back().first >= pages) {
        const auto number = static_cast<std::uint32_t>(ranges_.size() - 1);
        by_address_.erase(std::find(by_address_.begin(), by_address_.end(), number));
        n_files_ -= ranges_.back().file ? 1 : 0;
        ranges_.pop_back();
    }
    if (!ranges_.empty()) {
        Range& range = ranges_.back();
        const std::size_t held = std::min(pages - range.first, range.capacity) * page_bytes_;
        range.memory().shrink(mapped_size(held));
    }
    recount();
}

void MappedPages::recount() {
    count_ = 0;
    if (ranges_.empty()) return;
    const Range& last = ranges_.back();
    count_ = last.first + std::min(last.memory().size() / page_bytes_, last.capacity);
}

std::size_t MappedPages::bytes() const {
    std::size_t total = 0;
    for (const Range& range : ranges_) total += range.memory().size();
    return total;
}

const MappedPages::Range& MappedPages::range_of(std::size_t number) const {
    const auto after =
        std::upper_bound(ranges_.begin(), ranges_.end(), number,
                         [](std::size_t at, const Range& range) { return at < range.first; });
    return *(after - 1);
}

std::byte* MappedPages::at(std::size_t number) const {
    const Range& range = range_of(number);
    return range.memory().data() + (number - range.first) * page_bytes_;
}

std::size_t MappedPages::number_of(const std::byte* page) const {
    const auto after = std::upper_bound(
        by_address_.begin(), by_address_.end(), page,
        [&](const std::byte* at, std::uint32_t i) { return at < ranges_[i].memory().data(); });
    if (after != by_address_.begin()) {
        const Range& range = ranges_[*(after - 1)];
        const auto offset = static_cast<std::size_t>(page - range.memory().data());
        if (offset < range.memory().size()) return range.first + offset / page_bytes_;
    }
    throw std::logic_error("a page that is not of this pool");
}

}  // namespace entropykv
