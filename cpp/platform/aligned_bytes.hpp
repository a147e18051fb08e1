// Allocates zeroed bytes, aligned for the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "platform/scratch.hpp"

namespace entropykv {

class AlignedBytes {
public:
    AlignedBytes() = default;
    explicit AlignedBytes(std::size_t size) : bytes_(size + kAlignment), size_(size) {}

    std::byte* data() { return bytes_.data() + skipped(); }
    const std::byte* data() const { return bytes_.data() + skipped(); }
    std::size_t size() const { return size_; }
    std::size_t heap_bytes() const { return entropykv::heap_bytes(bytes_); }

private:
    static constexpr std::size_t kAlignment = 64;
    std::size_t skipped() const {
        const std::size_t over = reinterpret_cast<std::uintptr_t>(bytes_.data()) % kAlignment;
        return over == 0 ? 0 : kAlignment - over;
    }
    std::vector<std::byte> bytes_;
    std::size_t size_ = 0;
};

}  // namespace entropykv
