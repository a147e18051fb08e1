#include "platform/mapped_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <limits>
#include <new>
#include <utility>

namespace entropykv {
namespace {

// Memory that cannot be accessed does not count as used memory.
constexpr int kOfNoFile = MAP_PRIVATE | MAP_ANONYMOUS;

std::size_t whole(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

// All parts of a range have the same attributes except for their protection, so that the system
// needs at most two mappings: one with memory, one without.
void ask_for_huge_pages(std::byte* start, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
    madvise(start, bytes, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

}  // namespace

std::size_t mapped_size(std::size_t bytes) {
    const std::size_t slabs = whole(bytes, kSlabBytes);
    if (slabs - bytes <= kSlabBytes / 16) return slabs;
    return whole(bytes, static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
}

MappedMemory::MappedMemory(std::size_t bytes) {
    if (bytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
    const std::size_t reserved = whole(bytes, kSlabBytes);
    // One slab more is reserved, so that the memory can begin at a multiple of a slab.
    const std::size_t total = reserved + kSlabBytes;
    void* memory = mmap(nullptr, total, PROT_NONE, kOfNoFile, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    auto* start = static_cast<std::byte*>(memory);
    const auto address = reinterpret_cast<std::uintptr_t>(start);
    data_ = start + (whole(address, kSlabBytes) - address);
    reserved_ = reserved;
    const auto* end = start + total;
    if (data_ > start) munmap(start, static_cast<std::size_t>(data_ - start));
    if (data_ + reserved_ < end)
        munmap(data_ + reserved_, static_cast<std::size_t>(end - (data_ + reserved_)));
    ask_for_huge_pages(data_, reserved_);
}

MappedMemory::~MappedMemory() {
    if (data_ != nullptr) munmap(data_, reserved_);
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      reserved_(std::exchange(other.reserved_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(reserved_, other.reserved_);
    return *this;
}

void MappedMemory::grow(std::size_t bytes) {
    if (bytes <= size_) return;
    if (bytes > reserved_ || mprotect(data_ + size_, bytes - size_, PROT_READ | PROT_WRITE) != 0)
        throw std::bad_alloc();
    size_ = bytes;
}

// If the system refuses to split the mapping, the memory is still freed, and comes back when
// someone writes to it.
void MappedMemory::shrink(std::size_t bytes) noexcept {
    if (bytes >= size_) return;
    std::byte* start = data_ + bytes;
    const std::size_t n = size_ - bytes;
    if (mmap(start, n, PROT_NONE, kOfNoFile | MAP_FIXED, -1, 0) == MAP_FAILED) {
        madvise(start, n, MADV_DONTNEED);
        return;
    }
    ask_for_huge_pages(start, n);
    size_ = bytes;
}

}  // namespace entropykv
