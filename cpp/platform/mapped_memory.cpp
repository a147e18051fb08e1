#include "platform/mapped_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <utility>

namespace entropykv {
namespace {

std::size_t whole(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

MappedMemory::MappedMemory(std::size_t bytes) {
    const bool huge = whole(bytes, kSlabBytes) - bytes <= kSlabBytes / 16;
    const std::size_t unit = huge ? kSlabBytes : static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    size_ = whole(bytes, unit);
    const std::size_t total = huge ? size_ + unit : size_;  // to begin at a multiple
    void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    auto* start = static_cast<std::byte*>(memory);
    const auto address = reinterpret_cast<std::uintptr_t>(start);
    data_ = start + (whole(address, unit) - address);
    if (data_ > start) munmap(start, static_cast<std::size_t>(data_ - start));
    const auto* end = start + total;
    if (data_ + size_ < end) munmap(data_ + size_, static_cast<std::size_t>(end - (data_ + size_)));
#if defined(MADV_HUGEPAGE)
    if (huge) madvise(data_, size_, MADV_HUGEPAGE);
#endif
}

MappedMemory::~MappedMemory() {
    if (data_ != nullptr) munmap(data_, size_);
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

}  // namespace entropykv
