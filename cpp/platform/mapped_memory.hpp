// Reserves a range of addresses from the system, which cost nothing. The first part of the range
// has memory, which is zeroed at first; that part grows, and shrinks from its end.
#pragma once

#include <cstddef>

#include "platform/system_memory.hpp"

namespace entropykv {

// Returns how much memory `bytes` bytes take if no more will follow: whole slabs if that wastes
// next to nothing of the last one, otherwise pages of the system.
std::size_t mapped_size(std::size_t bytes);

class MappedMemory {
public:
    MappedMemory() = default;
    // Takes over mapped addresses, which the destructor gives back by release_addresses().
    MappedMemory(std::byte* data, std::size_t bytes)
        : data_(data), size_(bytes), reserved_(bytes) {}
    // Reserves addresses for `bytes` bytes, in whole slabs. Throws std::bad_alloc.
    explicit MappedMemory(std::size_t bytes);
    ~MappedMemory();
    MappedMemory(MappedMemory&& other) noexcept;
    MappedMemory& operator=(MappedMemory&& other) noexcept;

    // Maps memory for the first `bytes` bytes, a multiple of the system's pages up to reserved().
    // Throws std::bad_alloc, and then changes nothing.
    void grow(std::size_t bytes);
    // Gives the memory behind the first `bytes` bytes back; they must be a multiple of the system's
    // pages.
    void shrink(std::size_t bytes) noexcept;

    std::byte* data() const { return data_; }
    std::size_t size() const { return size_; }  // bytes that have memory
    std::size_t reserved() const { return reserved_; }

private:
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    std::size_t reserved_ = 0;
};

}  // namespace entropykv
