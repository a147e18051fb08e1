// ggml's blocks of 32 weights, and its ternary ones of 256, as groups of codes with a scale:
// weight = scale * (code - kZero), or scale * code + minimum where kHasMinimum.
//
// Of every type: kUnit values lie in kUnitBytes; codes(unit, j) are its values 32 j to 32 j + 31 in
// their order; scales(units, s, m) are those of its groups of kGroup values, one row a lane.
#pragma once

#include "products/eight_rows.hpp"

namespace entropykv {
namespace {

// 16 bytes hold the first 16 codes in their lower and the others in their upper halves.
inline __m256i nibbles(const std::byte* p) {
    const __m256i twice = _mm256_broadcastsi128_si256(load16(p));
    const __m256i shifted = _mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    return _mm256_and_si256(shifted, _mm256_set1_epi8(15));
}

struct Q4_0 {
    static constexpr int kUnit = 32, kUnitBytes = 18, kGroup = 32, kBits = 4, kZero = 8;
    static constexpr bool kHasMinimum = false;
    static __m256i codes(const std::byte* unit, int) { return nibbles(unit + 2); }
    static void scales(const RowPointers& units, __m256* s, __m256*) {
        s[0] = load_halves(units, 0);
    }
};

struct Q4_1 {
    static constexpr int kUnit = 32, kUnitBytes = 20, kGroup = 32, kBits = 4, kZero = 0;
    static constexpr bool kHasMinimum = true;
    static __m256i codes(const std::byte* unit, int) { return nibbles(unit + 4); }
    static void scales(const RowPointers& units, __m256* s, __m256* m) {
        s[0] = load_halves(units, 0);
        m[0] = load_halves(units, 2);
    }
};

struct Q8_0 {
    static constexpr int kUnit = 32, kUnitBytes = 34, kGroup = 32, kBits = 8;
    static constexpr int kZero = kHasVnni ? 128 : 0;
    static constexpr bool kHasMinimum = false;
    static __m256i codes(const std::byte* unit, int) {
        const __m256i weights = load32(unit + 2);
        return kHasVnni ? _mm256_xor_si256(weights, _mm256_set1_epi8(-128)) : weights;
    }
    static void scales(const RowPointers& units, __m256* s, __m256*) {
        s[0] = load_halves(units, 0);
    }
};

struct TQ2_0 {
    static constexpr int kUnit = 256, kUnitBytes = 66, kGroup = 256, kBits = 2, kZero = 1;
    static constexpr bool kHasMinimum = false;
    static __m256i codes(const std::byte* unit, int j) {
        const __m256i packed = load32(unit + 32 * (j / 4));
        return _mm256_and_si256(_mm256_srli_epi16(packed, 2 * (j % 4)), _mm256_set1_epi8(3));
    }
    static void scales(const RowPointers& units, __m256* s, __m256*) {
        s[0] = load_halves(units, 64);
    }
};

// Five ternary digits a byte, as fractions of 256: the digit is what is before the point when the
// byte is multiplied by 3, the following digits are what is behind it.
struct TQ1_0 {
    static constexpr int kUnit = 256, kUnitBytes = 54, kGroup = 256, kBits = 2, kZero = 1;
    static constexpr bool kHasMinimum = false;
    static __m256i codes(const std::byte* unit, int j) {
        if (j < 5) return digit(skip(load32(unit), j));
        const __m128i tail = load16(unit + 32);
        if (j < 7) return digit(pair(skip(tail, 2 * j - 10), skip(tail, 2 * j - 9)));
        const __m128i last = _mm_set1_epi32(load_as<std::int32_t>(unit + 48));
        const __m128i second = skip(last, 1);
        const __m128i third = skip(last, 2);
        const __m128i spread = _mm_unpacklo_epi64(_mm_unpacklo_epi32(last, second),
                                                  _mm_unpacklo_epi32(third, skip(last, 3)));
        return digit(pair(skip(tail, 4), spread));
    }
    static void scales(const RowPointers& units, __m256* s, __m256*) {
        s[0] = load_halves(units, 52);
    }

private:
    static __m256i pair(__m128i lower, __m128i upper) { return _mm256_set_m128i(upper, lower); }
    static __m256i skip(__m256i bytes, int digits) {
        for (int i = 0; i < digits; ++i)
            bytes = _mm256_add_epi8(bytes, _mm256_add_epi8(bytes, bytes));
        return bytes;
    }
    static __m128i skip(__m128i bytes, int digits) {
        for (int i = 0; i < digits; ++i) bytes = _mm_add_epi8(bytes, _mm_add_epi8(bytes, bytes));
        return bytes;
    }
    // Three quarters of the byte, rounded down, of which the upper two bits are left.
    static __m256i digit(__m256i bytes) {
        const __m256i none = _mm256_setzero_si256();
        const __m256i quarter = _mm256_avg_epu8(_mm256_avg_epu8(bytes, none), none);
        const __m256i scaled = _mm256_sub_epi8(bytes, quarter);
        return _mm256_and_si256(_mm256_srli_epi16(scaled, 6), _mm256_set1_epi8(3));
    }
};

}  // namespace
}  // namespace entropykv
