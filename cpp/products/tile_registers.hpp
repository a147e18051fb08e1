// The registers of a tile of rows of weights and tokens, one row a lane, behind the same names on
// every instruction set. Those of AVX2 are the ones that 8 rows have: see eight_rows.hpp.
#pragma once

#include "products/eight_rows.hpp"

namespace entropykv {
namespace {

#if defined(__AVX512VNNI__)
struct Tile {
    static constexpr int kLanes = 16, kVectors = 2, kTokens = 8;
};
using Ints = __m512i;
using Floats = __m512;
inline Ints load_ints(const std::byte* p) { return _mm512_loadu_si512(p); }
inline Ints broadcast_four(const std::byte* p) { return _mm512_set1_epi32(load_as<int>(p)); }
inline Ints add_fours(Ints sums, Ints codes, Ints activations) {
    return _mm512_dpbusd_epi32(sums, codes, activations);
}
inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline void store_floats(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
struct Tile {
    static constexpr int kLanes = 8, kVectors = 2, kTokens = 4;
};
using Ints = RowInts;
using Floats = RowFloats;
inline Ints load_ints(const std::byte* p) { return load32(p); }
inline Ints broadcast_four(const std::byte* p) { return _mm256_set1_epi32(load_as<int>(p)); }
inline Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
inline Floats broadcast(float x) { return same_floats(x); }
#else
struct Tile {
    static constexpr int kLanes = 4, kVectors = 2, kTokens = 4;
};
using Ints = int32x4_t;
using Floats = float32x4_t;
inline Ints load_ints(const std::byte* p) { return vreinterpretq_s32_u8(load16(p)); }
inline Floats load_floats(const float* p) { return vld1q_f32(p); }
inline void store_floats(float* p, Floats a) { vst1q_f32(p, a); }
inline Floats broadcast(float x) { return vdupq_n_f32(x); }
inline Floats to_floats(Ints a) { return vcvtq_f32_s32(a); }
inline Floats subtract(Floats a, Floats b) { return vsubq_f32(a, b); }
inline Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
// sums + codes times activations 4 kStep to 4 kStep + 3 of 16.
template <int kStep>
inline Ints add_fours_of(Ints sums, Ints codes, Ints activations) {
    const int8x16_t w = vreinterpretq_s8_s32(codes);
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_laneq_s32(sums, w, vreinterpretq_s8_s32(activations), kStep);
#else
    return add_fours(sums, w, vreinterpretq_s8_s32(vdupq_laneq_s32(activations, kStep)));
#endif
}
#endif

constexpr int kTileRows = Tile::kLanes * Tile::kVectors;

}  // namespace
}  // namespace entropykv
