// Activations rounded to 8 bits: n_values codes, then for every group of weights the scale there
// and what the product owes to the weights' zero: scale * (sum of codes) where a group has a
// minimum, or kZero * (sum of codes). Floats hold the sums of integers exactly.
#pragma once

#include <cmath>

#include "products/eight_rows.hpp"

namespace entropykv {
namespace {

template <class Type>
std::size_t token_bytes(int n_values) {
    const auto n = static_cast<std::size_t>(n_values);
    const std::size_t bytes = n + 2 * sizeof(float) * (n / Type::kGroup);
    return (bytes + 63) / 64 * 64;
}

// A rounded token from one of its groups on.
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

// Largest magnitude of n values, n a multiple of 8. As bits, magnitudes have the order of integers;
// NaN is above all and stays.
inline float largest_magnitude(const float* x, int n) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < n; i += 8)
        most = _mm256_max_epi32(
            most, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

// Rounds 16 values; returns the sum of their codes.
inline int round_16(const float* x, __m256 inverse, std::byte* codes) {
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
    const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), inverse));
    const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), bytes);
    const __m256i fours = widen(shorts);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
    return _mm_cvtsi128_si32(sum);
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
                sum += round_16(token + k, _mm256_set1_ps(inverse), rounded + k);
            *scales++ = scale;
            *offsets++ = static_cast<float>(sum) *
                         (Type::kHasMinimum ? scale : static_cast<float>(Type::kZero));
        }
    }
}

}  // namespace
}  // namespace entropykv
