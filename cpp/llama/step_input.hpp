// Collects what is written to a device at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "llama/device.hpp"

namespace entropykv {

// Empties `bytes`, and puts each part at an aligned offset there.
class StepInput {
public:
    StepInput(const Device& device, std::vector<std::uint8_t>& bytes)
        : device_(device), bytes_(bytes) {
        bytes_.clear();
    }

    // Appends values, and returns their offset in bytes.
    template <typename T>
    std::size_t add(const std::vector<T>& values) {
        const std::size_t offset = device_.aligned(bytes_.size());
        bytes_.resize(offset + values.size() * sizeof(T));
        if (!values.empty())
            std::memcpy(bytes_.data() + offset, values.data(), values.size() * sizeof(T));
        return offset;
    }

private:
    const Device& device_;
    std::vector<std::uint8_t>& bytes_;
};

}  // namespace entropykv
