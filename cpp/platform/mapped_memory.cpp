#include "platform/mapped_memory.hpp"

#include <limits>
#include <new>
#include <utility>

namespace entropykv {
namespace {

std::size_t whole(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

std::size_t mapped_size(std::size_t bytes) {
    const std::size_t slabs = whole(bytes, kSlabBytes);
    if (slabs - bytes <= kSlabBytes / 16) return slabs;
    return whole(bytes, system_page_bytes());
}

MappedMemory::MappedMemory(std::size_t bytes) {
    if (bytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
    const std::size_t reserved = whole(bytes, kSlabBytes);
    data_ = reserve_addresses(reserved);
    if (data_ == nullptr) throw std::bad_alloc();
    reserved_ = reserved;
}

MappedMemory::~MappedMemory() {
    if (data_ != nullptr) release_addresses(data_, reserved_);
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
    if (bytes > reserved_ || !map_memory(data_ + size_, bytes - size_)) throw std::bad_alloc();
    size_ = bytes;
}

void MappedMemory::shrink(std::size_t bytes) noexcept {
    if (bytes < size_ && unmap_memory(data_ + bytes, size_ - bytes)) size_ = bytes;
}

}  // namespace entropykv
