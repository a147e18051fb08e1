// Memory straight from the system, zeroed, which goes back to it whole.
#pragma once

#include <cstddef>

namespace entropykv {

// A slab of pages is one huge page where the system has them: who reads many pages of a few KiB
// would pay for a TLB miss with each.
constexpr std::size_t kSlabBytes = std::size_t{2} << 20;

// As many as fit, and one that does not.
constexpr std::size_t pages_of_slab(std::size_t page_bytes) {
    return page_bytes < kSlabBytes ? kSlabBytes / page_bytes : 1;
}

class MappedMemory {
public:
    // At least so many bytes; what fills slabs all but a little is whole slabs, at multiples of
    // their size. Throws std::bad_alloc.
    explicit MappedMemory(std::size_t bytes);
    ~MappedMemory();
    MappedMemory(MappedMemory&& other) noexcept;
    MappedMemory& operator=(MappedMemory&& other) noexcept;

    std::byte* data() const { return data_; }
    std::size_t size() const { return size_; }

private:
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace entropykv
