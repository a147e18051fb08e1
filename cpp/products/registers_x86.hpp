// Part of eight_rows.hpp: implements registers as 256-bit AVX2 registers, with VNNI if the compiler
// may use it.
#pragma once

#include <immintrin.h>

namespace entropykv {
namespace {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kHasVnni = true;
inline __m256i add_fours(__m256i sums, __m256i codes, __m256i activations) {
#if defined(__AVX512VNNI__)
    return _mm256_dpbusd_epi32(sums, codes, activations);
#else
    return _mm256_dpbusd_avx_epi32(sums, codes, activations);
#endif
}
#else
constexpr bool kHasVnni = false;
#endif
// VNNI multiplies unsigned codes with signed activations.
constexpr bool kSignedCodes = !kHasVnni;

// If no instruction adds four products in 32 bits, products with weights of up to 6 bits are added
// up in 16 bits: 4 pairs of 5 bits, or 2 of 6 bits.
template <int kBits>
constexpr bool kShortSums = !kHasVnni && kBits <= 6;

using RowBytes = __m256i;
using HalfBytes = __m128i;
using RowInts = __m256i;
using RowFloats = __m256;

inline RowBytes load32(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline HalfBytes load16(const std::byte* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline HalfBytes four_bytes(const std::byte* p) { return _mm_set1_epi32(load_as<int>(p)); }
inline void store32(std::byte* p, RowBytes a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
}
inline RowBytes pair(HalfBytes lower, HalfBytes upper) { return _mm256_set_m128i(upper, lower); }
inline HalfBytes first_fours(HalfBytes a, HalfBytes b, HalfBytes c, HalfBytes d) {
    return _mm_unpacklo_epi64(_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
}
inline RowBytes nibbles(HalfBytes a) {
    const __m256i shifted = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(a),
                                              _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    return _mm256_and_si256(shifted, _mm256_set1_epi8(15));
}
inline RowBytes field(RowBytes a, int shift, int mask) {
    const __m256i shifted = shift == 0 ? a : _mm256_srli_epi16(a, shift);
    return _mm256_and_si256(shifted, _mm256_set1_epi8(static_cast<char>(mask)));
}
inline RowBytes with_upper(RowBytes low, RowBytes high, int shift) {
    return _mm256_or_si256(low, _mm256_slli_epi16(high, shift));
}
inline RowBytes bits_of(std::uint32_t bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return _mm256_maskz_set1_epi8(bits, 1);
#else
    const __m256i byte_of_lane =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of_lane = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    const __m256i bytes =
        _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), byte_of_lane);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of_lane), bit_of_lane);
    return _mm256_and_si256(is_set, _mm256_set1_epi8(1));
#endif
}
inline RowBytes flip_signs(RowBytes a) { return _mm256_xor_si256(a, _mm256_set1_epi8(-128)); }
inline RowBytes three_times(RowBytes a) { return _mm256_add_epi8(a, _mm256_add_epi8(a, a)); }
inline HalfBytes three_times(HalfBytes a) { return _mm_add_epi8(a, _mm_add_epi8(a, a)); }
inline RowBytes three_quarters(RowBytes a) {
    const __m256i none = _mm256_setzero_si256();
    return _mm256_sub_epi8(a, _mm256_avg_epu8(_mm256_avg_epu8(a, none), none));
}

inline RowFloats same_floats(float x) { return _mm256_set1_ps(x); }
inline void store_floats(float* p, RowFloats a) { _mm256_storeu_ps(p, a); }
inline RowFloats to_floats(RowInts a) { return _mm256_cvtepi32_ps(a); }
inline RowFloats subtract(RowFloats a, RowFloats b) { return _mm256_sub_ps(a, b); }
inline RowFloats multiply(RowFloats a, RowFloats b) { return _mm256_mul_ps(a, b); }
inline RowFloats multiply_add(RowFloats a, RowFloats b, RowFloats c) {
    return _mm256_fmadd_ps(a, b, c);
}
inline RowFloats low_halves(RowBytes a) {
    const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}
inline RowFloats high_halves(RowBytes a) { return low_halves(_mm256_srli_epi32(a, 16)); }
inline RowFloats unsigned_bytes(RowBytes a, int k) {
    return to_floats(_mm256_and_si256(_mm256_srli_epi32(a, 8 * k), _mm256_set1_epi32(255)));
}
inline RowFloats signed_bytes(RowBytes a, int k) {
    return to_floats(_mm256_srai_epi32(_mm256_slli_epi32(a, 24 - 8 * k), 24));
}

// Loads 4 bytes of each of 4 rows, from an offset on.
template <class R>
inline __m128i four_of_four(const R& rows, std::size_t offset) {
    const auto four = [&](int r) { return load_as<int>(rows.near(r) + offset); };
    return _mm_unpacklo_epi64(_mm_insert_epi32(_mm_cvtsi32_si128(four(0)), four(1), 1),
                              _mm_insert_epi32(_mm_cvtsi32_si128(four(2)), four(3), 1));
}

template <class R>
inline __m128i eight_halves(const R& rows, std::size_t offset) {
    const auto half = [&](int r) { return load_as<short>(rows[r] + offset); };
    return _mm_setr_epi16(half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7));
}

struct EightRows {
    static constexpr int kCount = kRows;
    using Bytes = RowBytes;
    using Floats = RowFloats;

    template <class R>
    static Floats halves(const R& rows, std::size_t offset) {
        return _mm256_cvtph_ps(eight_halves(rows, offset));
    }
    template <class R>
    static void two_halves(const R& rows, std::size_t offset, Floats& first, Floats& second) {
        const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        const __m128i a = _mm_shuffle_epi8(four_of_four(rows, offset), order);
        const __m128i b = _mm_shuffle_epi8(four_of_four(rows.from(4), offset), order);
        first = _mm256_cvtph_ps(_mm_unpacklo_epi64(a, b));
        second = _mm256_cvtph_ps(_mm_unpackhi_epi64(a, b));
    }
    template <class R>
    static void columns(const R& rows, std::size_t offset, Bytes (&columns)[4]) {
        const R upper = rows.from(4);
        __m256i a[4], b[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            a[i] = pair(load16(rows.near(i) + offset), load16(upper.near(i) + offset));
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            columns[2 * i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
            columns[2 * i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        }
    }
    static void store(std::byte* p, Bytes a) { store32(p, a); }
};

inline __m256i widen(__m256i shorts) { return _mm256_madd_epi16(shorts, _mm256_set1_epi16(1)); }

// Holds sums of pairs in 16 bits (kShortSums), or of fours in 32 bits.
using Partial = __m256i;
inline Partial no_products() { return _mm256_setzero_si256(); }

template <int kBits, bool kSplit>
inline Partial add_products(Partial sums, RowBytes codes, RowBytes activations) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    return add_fours(sums, codes, activations);
#else
    if constexpr (kBits == 8)
        return _mm256_add_epi32(sums,
                                widen(_mm256_maddubs_epi16(_mm256_abs_epi8(codes),
                                                           _mm256_sign_epi8(activations, codes))));
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, activations));
#endif
}

// Reduces the sums of 4 rows: each lane of 128 bits gets the sum of its half for each row.
template <int kBits>
inline __m256i reduce_four(const Partial* p) {
    if constexpr (!kShortSums<kBits>)
        return _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
    const __m256i a = _mm256_hadd_epi16(p[0], p[1]);
    const __m256i b = _mm256_hadd_epi16(p[2], p[3]);
    if constexpr (kBits == 6) return _mm256_hadd_epi32(widen(a), widen(b));
    return widen(_mm256_hadd_epi16(a, b));
}

template <int kBits>
inline void reduce_halves(const Partial (&p)[kRows], RowInts& lower, RowInts& upper) {
    const __m256i first = reduce_four<kBits>(p);
    const __m256i second = reduce_four<kBits>(p + 4);
    lower = _mm256_permute2x128_si256(first, second, 0x20);
    upper = _mm256_permute2x128_si256(first, second, 0x31);
}

template <int kBits>
inline RowInts reduce(const Partial (&p)[kRows]) {
    RowInts lower, upper;
    reduce_halves<kBits>(p, lower, upper);
    return _mm256_add_epi32(lower, upper);
}

// Read as integers, magnitudes have the same order as floats; NaN is above all others and stays.
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

inline int round_16(const float* x, float inverse, std::byte* codes) {
    const __m256 factor = _mm256_set1_ps(inverse);
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), factor));
    const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), factor));
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

}  // namespace
}  // namespace entropykv
