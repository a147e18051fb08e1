// ggml's K types: units of 256 weights whose groups have scales of their own, in steps of the
// unit's. See block_types.hpp.
#pragma once

#include "products/eight_rows.hpp"

namespace entropykv {
namespace {

// The first 8 of 16 bytes as floats.
inline __m256 unsigned_bytes(__m128i bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}
inline __m256 signed_bytes(__m128i bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

// Scales and minima of the 8 groups of Q4_K and Q5_K, 6 bits each in 12 bytes.
inline void six_bit_scales(const RowPointers& units, __m256* s, __m256* m) {
    __m256 scale[kRows], minimum[kRows];
    for (int r = 0; r < kRows; ++r) {
        const auto a = load_as<std::uint32_t>(units[r] + 4);
        const auto b = load_as<std::uint32_t>(units[r] + 8);
        const auto c = load_as<std::uint32_t>(units[r] + 12);
        const std::uint32_t upper_scales = (c & 0x0f0f0f0fu) | ((a >> 6 & 0x03030303u) << 4);
        const std::uint32_t upper_minima = (c >> 4 & 0x0f0f0f0fu) | ((b >> 6 & 0x03030303u) << 4);
        scale[r] = unsigned_bytes(_mm_set_epi64x(
            0, static_cast<long long>(static_cast<std::uint64_t>(upper_scales) << 32 |
                                      (a & 0x3f3f3f3fu))));
        minimum[r] = unsigned_bytes(_mm_set_epi64x(
            0, static_cast<long long>(static_cast<std::uint64_t>(upper_minima) << 32 |
                                      (b & 0x3f3f3f3fu))));
    }
    transpose(scale);
    transpose(minimum);
    const __m256 step = load_halves(units, 0);
    const __m256 minus = _mm256_sub_ps(_mm256_setzero_ps(), load_halves(units, 2));
    for (int g = 0; g < kRows; ++g) {
        s[g] = _mm256_mul_ps(scale[g], step);
        m[g] = _mm256_mul_ps(minimum[g], minus);
    }
}

// 32 bytes hold 32 codes in their lower and the next 32 in their upper halves.
inline __m256i nibbles_of_two(const std::byte* p, int j) {
    const __m256i packed = load32(p + 32 * (j / 2));
    return _mm256_and_si256(j % 2 == 0 ? packed : _mm256_srli_epi16(packed, 4),
                            _mm256_set1_epi8(15));
}

struct Q4_K {
    static constexpr int kUnit = 256, kUnitBytes = 144, kGroup = 32, kBits = 4, kZero = 0;
    static constexpr bool kHasMinimum = true;
    static __m256i codes(const std::byte* unit, int j) { return nibbles_of_two(unit + 16, j); }
    static void scales(const RowPointers& units, __m256* s, __m256* m) {
        six_bit_scales(units, s, m);
    }
};

struct Q5_K {
    static constexpr int kUnit = 256, kUnitBytes = 176, kGroup = 32, kBits = 5, kZero = 0;
    static constexpr bool kHasMinimum = true;
    static __m256i codes(const std::byte* unit, int j) {
        const __m256i fifth =
            _mm256_and_si256(_mm256_srli_epi16(load32(unit + 16), j), _mm256_set1_epi8(1));
        return _mm256_or_si256(nibbles_of_two(unit + 48, j), _mm256_slli_epi16(fifth, 4));
    }
    static void scales(const RowPointers& units, __m256* s, __m256* m) {
        six_bit_scales(units, s, m);
    }
};

struct Q6_K {
    static constexpr int kUnit = 256, kUnitBytes = 210, kGroup = 16, kBits = 6, kZero = 32;
    static constexpr bool kHasMinimum = false;
    static __m256i codes(const std::byte* unit, int j) {
        const int half = j / 4, quarter = j % 4;
        const __m256i packed = load32(unit + 64 * half + 32 * (quarter % 2));
        const __m256i low = _mm256_and_si256(quarter < 2 ? packed : _mm256_srli_epi16(packed, 4),
                                             _mm256_set1_epi8(15));
        const __m256i upper = _mm256_srli_epi16(load32(unit + 128 + 32 * half), 2 * quarter);
        const __m256i high = _mm256_and_si256(upper, _mm256_set1_epi8(3));
        return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
    }
    static void scales(const RowPointers& units, __m256* s, __m256*) {
        const __m256 step = load_halves(units, 208);
        for (int first = 0; first < 16; first += kRows) {
            __m256 scale[kRows];
            for (int r = 0; r < kRows; ++r)
                scale[r] = signed_bytes(
                    _mm_loadl_epi64(reinterpret_cast<const __m128i*>(units[r] + 192 + first)));
            transpose(scale);
            for (int g = 0; g < kRows; ++g) s[first + g] = _mm256_mul_ps(scale[g], step);
        }
    }
};

}  // namespace
}  // namespace entropykv
