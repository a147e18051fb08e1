// 256-bit registers over 8 rows of weights: what every x86 kernel of products is made of.
// Everything lives in an unnamed namespace, so that no function built for one instruction set is
// ever linked into another.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace entropykv {
namespace {

constexpr int kRows = 8;

#if defined(__AVX512VNNI__)
constexpr bool kHasVnni = true;
#else
constexpr bool kHasVnni = false;
#endif

// Products with weights of fewer bits add up in 16 bits where no instruction adds four of them in
// 32: 4 pairs of 5 bits, 2 of 6 bits.
template <int kBits>
constexpr bool kShortSums = !kHasVnni && kBits <= 6;

using RowPointers = const std::byte* [kRows];

inline __m256i load32(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline __m128i load16(const std::byte* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
template <typename T>
inline T load_as(const std::byte* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// The f16 that lies `offset` bytes behind each row's pointer.
inline __m256 load_halves(const RowPointers& rows, std::size_t offset) {
    alignas(16) std::uint16_t halves[kRows];
    for (int r = 0; r < kRows; ++r) halves[r] = load_as<std::uint16_t>(rows[r] + offset);
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(halves)));
}

// 8 registers of 8 values each, rows become columns.
inline void transpose(__m256i (&a)[kRows]) {
    __m256i b[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    __m256i c[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i += 4) {
        c[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        c[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        c[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        c[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows / 2; ++i) {
        a[i] = _mm256_permute2x128_si256(c[i], c[i + 4], 0x20);
        a[i + 4] = _mm256_permute2x128_si256(c[i], c[i + 4], 0x31);
    }
}

inline void transpose(__m256 (&a)[kRows]) {
    __m256i bits[kRows];
    for (int i = 0; i < kRows; ++i) bits[i] = _mm256_castps_si256(a[i]);
    transpose(bits);
    for (int i = 0; i < kRows; ++i) a[i] = _mm256_castsi256_ps(bits[i]);
}

inline __m256i widen(__m256i shorts) { return _mm256_madd_epi16(shorts, _mm256_set1_epi16(1)); }

// Products of 32 codes with 32 activations, added up in pairs (16-bit lanes, kShortSums) or in
// fours. Codes are unsigned; of 8 bits, they are signed where there is no VNNI.
template <int kBits>
inline __m256i partial_sums(__m256i codes, __m256i activations) {
#if defined(__AVX512VNNI__)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, activations);
#else
    if constexpr (kBits == 8)
        return widen(
            _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(activations, codes)));
    return _mm256_maddubs_epi16(codes, activations);
#endif
}

template <int kBits>
inline __m256i add_partial(__m256i a, __m256i b) {
    return kShortSums<kBits> ? _mm256_add_epi16(a, b) : _mm256_add_epi32(a, b);
}

// Sums over the lower and the upper 16 values of every row.
struct HalfSums {
    __m256i lower;
    __m256i upper;
};

// Of 4 rows: a lane of 128 bits has its half's sum of each.
template <int kBits>
inline __m256i reduce_four(const __m256i* p) {
    if constexpr (!kShortSums<kBits>)
        return _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
    const __m256i a = _mm256_hadd_epi16(p[0], p[1]);
    const __m256i b = _mm256_hadd_epi16(p[2], p[3]);
    if constexpr (kBits == 6) return _mm256_hadd_epi32(widen(a), widen(b));
    return widen(_mm256_hadd_epi16(a, b));
}

template <int kBits>
inline HalfSums reduce(const __m256i (&p)[kRows]) {
    const __m256i first = reduce_four<kBits>(p);
    const __m256i second = reduce_four<kBits>(p + 4);
    return {_mm256_permute2x128_si256(first, second, 0x20),
            _mm256_permute2x128_si256(first, second, 0x31)};
}

}  // namespace
}  // namespace entropykv
