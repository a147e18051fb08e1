// Part of simd.hpp: implements vectors with AVX2, FMA and F16C, 8 floats each.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace entropykv {
namespace {

constexpr int kLanes = 8;
constexpr int kRowVectors = 2;
constexpr int kDecodeBlock = 4;
constexpr int kAccumulators = 12;
constexpr float kVanishing = -127.0f;  // scale_by_power() makes 0 of 2^-127
struct Vec {
    __m256 v;
};
inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline Vec load_half(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store_half(std::uint16_t* p, Vec a) {
    const __m256 limit = _mm256_set1_ps(65504.0f);
    const __m256 finite =
        _mm256_max_ps(_mm256_min_ps(a.v, limit), _mm256_sub_ps(_mm256_setzero_ps(), limit));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(finite, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec load_int8(const std::int8_t* p) {
    return {_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec maximum(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline bool any_less(Vec a, Vec b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)) != 0;
}
inline Vec round_nearest(Vec a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// Brings the halves of shuffled vectors in order: shuffles of AVX2 work on halves.
inline Vec in_order(__m256 a) {
    return {_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), _MM_SHUFFLE(3, 1, 2, 0)))};
}
inline Vec even_lanes(Vec a, Vec b) {
    return in_order(_mm256_shuffle_ps(a.v, b.v, _MM_SHUFFLE(2, 0, 2, 0)));
}
inline Vec odd_lanes(Vec a, Vec b) {
    return in_order(_mm256_shuffle_ps(a.v, b.v, _MM_SHUFFLE(3, 1, 3, 1)));
}
inline Vec scale_by_power(Vec a, Vec power) {
    const __m256i exponent = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(power.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
}
inline float sum(Vec a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(Vec a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

struct IntVec {
    __m256i v;
};
inline IntVec broadcast_int(std::int32_t x) { return {_mm256_set1_epi32(x)}; }
inline IntVec load_ints(const void* p) {
    return {_mm256_loadu_si256(static_cast<const __m256i*>(p))};
}
inline void store_ints(void* p, IntVec a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a.v); }
inline Vec to_float(IntVec a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline IntVec operator+(IntVec a, IntVec b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline std::int32_t sum(IntVec a) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    half = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 1)));
}
inline IntVec round_to_int(Vec a) { return {_mm256_cvtps_epi32(a.v)}; }
inline void store_shorts(std::int16_t* p, IntVec a) {
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(p),
        _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1)));
}
inline IntVec pairs_of(IntVec low, IntVec high) {
    return {_mm256_blend_epi16(low.v, _mm256_slli_epi32(high.v, 16), 0xaa)};
}
inline IntVec even_bytes(IntVec a) { return {_mm256_srai_epi16(_mm256_slli_epi16(a.v, 8), 8)}; }
inline IntVec odd_bytes(IntVec a) { return {_mm256_srai_epi16(a.v, 8)}; }
inline IntVec even_unsigned_bytes(IntVec a) {
    return {_mm256_and_si256(a.v, _mm256_set1_epi32(0x00ff00ff))};
}
inline IntVec odd_unsigned_bytes(IntVec a) { return {_mm256_srli_epi16(a.v, 8)}; }
inline IntVec dot_pairs(IntVec sums, IntVec a, IntVec b) {
    return {_mm256_add_epi32(sums.v, _mm256_madd_epi16(a.v, b.v))};
}
inline IntVec byte_of(IntVec a, int place) {
    return {_mm256_srai_epi32(_mm256_sll_epi32(a.v, _mm_cvtsi32_si128(24 - 8 * place)), 24)};
}
inline IntVec nibble_of(IntVec a, int place) {
    return {_mm256_and_si256(_mm256_srl_epi32(a.v, _mm_cvtsi32_si128(4 * place)),
                             _mm256_set1_epi32(15))};
}
inline IntVec nibbles(IntVec a, int place) {
    return {_mm256_and_si256(_mm256_srl_epi16(a.v, _mm_cvtsi32_si128(4 * place)),
                             _mm256_set1_epi8(15))};
}
inline IntVec looked_up(IntVec a, const std::int8_t* table) {
    const __m128i of_table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(of_table), a.v)};
}
inline IntVec flip_high_bits(IntVec a) {
    return {_mm256_xor_si256(a.v, _mm256_set1_epi8(static_cast<char>(0x80)))};
}

}  // namespace
}  // namespace entropykv
