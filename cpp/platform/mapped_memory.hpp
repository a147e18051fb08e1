// A range of addresses straight from the system, the first part of which has memory. Addresses
// cost nothing; memory is zeroed, and goes back to the system from the end.
#pragma once

#include <cstddef>

namespace entropykv {

// Memory comes in slabs, each of which is one huge page where the system has them: who reads many
// pages of a few KiB would pay for a TLB miss with each.
constexpr std::size_t kSlabBytes = std::size_t{2} << 20;

// How much memory so many bytes take, where no more will follow: whole slabs, if that wastes next
// to nothing of the last one, else pages of the system.
std::size_t mapped_size(std::size_t bytes);

class MappedMemory {
public:
    // Reserves addresses for so many bytes, in whole slabs. Throws std::bad_alloc.
    explicit MappedMemory(std::size_t bytes);
    ~MappedMemory();
    MappedMemory(MappedMemory&& other) noexcept;
    MappedMemory& operator=(MappedMemory&& other) noexcept;

    // Gives the first bytes memory, a multiple of the system's pages and no more than reserved().
    // Throws std::bad_alloc, and nothing has changed.
    void grow(std::size_t bytes);
    // Gives the system back what lies behind the first bytes (the same multiple).
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
