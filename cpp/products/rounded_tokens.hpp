// Stores activations rounded to 8 bits: n_values codes, then for every group of weights its scale
// and the term that corrects for the zero of the weights: scale * (sum of codes) if a group has a
// minimum, otherwise kZero * (sum of codes). Floats hold these sums of integers exactly.
#pragma once

#include "products/eight_rows.hpp"

namespace entropykv {
namespace {

template <class Type>
std::size_t token_bytes(int n_values) {
    const auto n = static_cast<std::size_t>(n_values);
    const std::size_t bytes = n + 2 * sizeof(float) * (n / Type::kGroup);
    return (bytes + 63) / 64 * 64;
}

// Refers to a rounded token from one of its groups on.
struct TokenPart {
    const std::byte* codes;
    const float* scales;
    const float* offsets;
};

template <class Type>
inline TokenPart part_of(const std::byte* token, int n_values, int first) {
    const auto* scales = reinterpret_cast<const float*>(token + n_values);
    const int group = first / Type::kGroup;
    return {token + first, scales + group, scales + n_values / Type::kGroup + group};
}

template <class Type>
void quantise(const float* token, int n_values, std::byte* rounded) {
    auto* scales = reinterpret_cast<float*>(rounded + n_values);
    float* offsets = scales + n_values / Type::kGroup;
    for (int i = 0; i < n_values; i += Type::kUnit) {
        const float scale = largest_magnitude(token + i, Type::kUnit) / 127.0f;
        const float inverse = scale > 0x1p-120f ? 1.0f / scale : 0.0f;
        for (int j = i; j < i + Type::kUnit; j += Type::kGroup) {
            int sum = 0;
            for (int k = j; k < j + Type::kGroup; k += 16)
                sum += round_16(token + k, inverse, rounded + k);
            *scales++ = scale;
            *offsets++ = static_cast<float>(sum) *
                         (Type::kHasMinimum ? scale : static_cast<float>(Type::kZero));
        }
    }
}

}  // namespace
}  // namespace entropykv
