// Part of simd.hpp: implements vectors with AVX-512 (F, BW, VL, DQ; VNNI if the compiler may use
// it), 16 floats each.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace entropykv {
namespace {

constexpr int kLanes = 16;
constexpr int kRowVectors = 4;         // row vectors per register block of the prompt kernel
constexpr int kDecodeBlock = 8;        // query rows per register block of the decode kernel
constexpr int kAccumulators = 24;      // registers for the sums of the decode kernel
constexpr float kVanishing = -300.0f;  // 2^-300 underflows to 0
struct Vec {
    __m512 v;
};
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec load_half(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_half(std::uint16_t* p, Vec a) {
    const __m512 limit = _mm512_set1_ps(65504.0f);
    const __m512 finite =
        _mm512_max_ps(_mm512_min_ps(a.v, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(finite, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec load_int8(const std::int8_t* p) {
    return {_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec maximum(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline bool any_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ) != 0; }
inline Vec round_nearest(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec even_lanes(Vec a, Vec b) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return {_mm512_permutex2var_ps(a.v, even, b.v)};
}
inline Vec odd_lanes(Vec a, Vec b) {
    const __m512i odd =
        _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return {_mm512_permutex2var_ps(a.v, odd, b.v)};
}
inline Vec scale_by_power(Vec a, Vec power) { return {_mm512_scalef_ps(a.v, power.v)}; }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
// Returns in lane i the sum of vector i of kLanes vectors.
inline Vec sums_of(const Vec* of) {
    __m512 fours[4];  // each quarter has four lanes that four vectors share
    for (int i = 0; i < 4; ++i) {
        const auto halves = [&](int j) {
            const __m512 a = of[4 * i + j].v;
            const __m512 b = of[4 * i + j + 1].v;
            return _mm512_castps_pd(
                _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        };
        const __m512d a = halves(0);
        const __m512d b = halves(2);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const auto quarters = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return {quarters(quarters(fours[0], fours[1]), quarters(fours[2], fours[3]))};
}

struct IntVec {
    __m512i v;
};
inline IntVec broadcast_int(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline IntVec load_ints(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_ints(void* p, IntVec a) { _mm512_storeu_si512(p, a.v); }
inline Vec to_float(IntVec a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline IntVec operator+(IntVec a, IntVec b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline std::int32_t sum(IntVec a) { return _mm512_reduce_add_epi32(a.v); }
inline IntVec round_to_int(Vec a) { return {_mm512_cvtps_epi32(a.v)}; }
inline void store_shorts(std::int16_t* p, IntVec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
inline IntVec pairs_of(IntVec low, IntVec high) {
    return {_mm512_mask_blend_epi16(0xaaaaaaaa, low.v, _mm512_slli_epi32(high.v, 16))};
}
inline IntVec even_bytes(IntVec a) { return {_mm512_srai_epi16(_mm512_slli_epi16(a.v, 8), 8)}; }
inline IntVec odd_bytes(IntVec a) { return {_mm512_srai_epi16(a.v, 8)}; }
inline IntVec even_unsigned_bytes(IntVec a) {
    return {_mm512_and_si512(a.v, _mm512_set1_epi32(0x00ff00ff))};
}
inline IntVec odd_unsigned_bytes(IntVec a) { return {_mm512_srli_epi16(a.v, 8)}; }
inline IntVec dot_pairs(IntVec sums, IntVec a, IntVec b) {
#if defined(__AVX512VNNI__)
    // With the intrinsic, GCC 12 copies the sums of a loop back and forth, which halves the speed.
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums.v) : "v"(a.v), "vm"(b.v));
    return sums;
#else
    return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}
inline IntVec byte_of(IntVec a, int place) {
    return {_mm512_srai_epi32(_mm512_sll_epi32(a.v, _mm_cvtsi32_si128(24 - 8 * place)), 24)};
}
inline IntVec nibble_of(IntVec a, int place) {
    return {_mm512_and_si512(_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(4 * place)),
                             _mm512_set1_epi32(15))};
}
inline IntVec nibbles(IntVec a, int place) {
    return {_mm512_and_si512(_mm512_srl_epi16(a.v, _mm_cvtsi32_si128(4 * place)),
                             _mm512_set1_epi8(15))};
}
inline IntVec looked_up(IntVec a, const std::int8_t* table) {
    const __m128i of_table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(of_table), a.v)};
}
inline IntVec flip_high_bits(IntVec a) {
    return {_mm512_xor_si512(a.v, _mm512_set1_epi8(static_cast<char>(0x80)))};
}

// Moves entries of a group, row by row: a row has one value of every entry. from, to, n: see
// LaneMoves.
class LaneMap {
public:
    LaneMap(const std::uint8_t* from, const std::uint8_t* to, int n) {
        std::uint16_t halves[16]{};
        std::uint32_t ints[16]{};
        for (int i = 0; i < n; ++i) {
            halves[to[i]] = from[i];
            ints[to[i]] = from[i];
            mask_ = static_cast<__mmask16>(mask_ | 1u << to[i]);
        }
        halves_ = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves));
        ints_ = _mm512_loadu_si512(ints);
    }
    void move(const std::uint16_t* from, std::uint16_t* to) const {
        auto* target = reinterpret_cast<__m256i*>(to);
        const __m256i row = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        _mm256_storeu_si256(
            target, _mm256_mask_permutexvar_epi16(_mm256_loadu_si256(target), mask_, halves_, row));
    }
    void move(const std::uint32_t* from, std::uint32_t* to) const {
        const __m512i row = _mm512_loadu_si512(from);
        _mm512_storeu_si512(
            to, _mm512_mask_permutexvar_epi32(_mm512_loadu_si512(to), mask_, ints_, row));
    }

private:
    __mmask16 mask_ = 0;
    __m256i halves_;
    __m512i ints_;
};

}  // namespace
}  // namespace entropykv
