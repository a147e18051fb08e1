// Part of simd.hpp: implements vectors with NEON, 4 floats each; there are 32 registers.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace entropykv {
namespace {

constexpr int kLanes = 4;
constexpr int kRowVectors = 4;
constexpr int kDecodeBlock = 4;
constexpr int kAccumulators = 16;
constexpr float kVanishing = -127.0f;  // scale_by_power() makes 0 of 2^-127
struct Vec {
    float32x4_t v;
};
inline Vec zero() { return {vdupq_n_f32(0.0f)}; }
inline Vec broadcast(float x) { return {vdupq_n_f32(x)}; }
inline Vec load(const float* p) { return {vld1q_f32(p)}; }
inline void store(float* p, Vec a) { vst1q_f32(p, a.v); }
inline Vec load_half(const std::uint16_t* p) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))};
}
inline void store_half(std::uint16_t* p, Vec a) {
    const float32x4_t limit = vdupq_n_f32(65504.0f);
    const float32x4_t finite = vmaxnmq_f32(vminnmq_f32(a.v, limit), vnegq_f32(limit));
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(finite)));
}
inline Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return {vbslq_f32(vcltq_f32(a.v, b.v), yes.v, no.v)};
}
// If one of the two is not a number, returns the other.
inline Vec maximum(Vec a, Vec b) { return {vmaxnmq_f32(a.v, b.v)}; }
inline bool any_less(Vec a, Vec b) { return vmaxvq_u32(vcltq_f32(a.v, b.v)) != 0; }
inline Vec round_nearest(Vec a) { return {vrndnq_f32(a.v)}; }
inline Vec even_lanes(Vec a, Vec b) { return {vuzp1q_f32(a.v, b.v)}; }
inline Vec odd_lanes(Vec a, Vec b) { return {vuzp2q_f32(a.v, b.v)}; }
inline Vec scale_by_power(Vec a, Vec power) {
    const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(power.v), vdupq_n_s32(127)), 23);
    return {vmulq_f32(a.v, vreinterpretq_f32_s32(exponent))};
}
inline float sum(Vec a) { return vaddvq_f32(a.v); }
inline float largest(Vec a) { return vmaxvq_f32(a.v); }

struct IntVec {
    int32x4_t v;
};
inline int16x8_t as_shorts(IntVec a) { return vreinterpretq_s16_s32(a.v); }
inline IntVec from_shorts(int16x8_t a) { return {vreinterpretq_s32_s16(a)}; }
inline IntVec broadcast_int(std::int32_t x) { return {vdupq_n_s32(x)}; }
inline IntVec load_ints(const void* p) {
    return {vreinterpretq_s32_u8(vld1q_u8(static_cast<const std::uint8_t*>(p)))};
}
inline void store_ints(void* p, IntVec a) { vst1q_s32(static_cast<std::int32_t*>(p), a.v); }
inline Vec to_float(IntVec a) { return {vcvtq_f32_s32(a.v)}; }
inline IntVec operator+(IntVec a, IntVec b) { return {vaddq_s32(a.v, b.v)}; }
inline std::int32_t sum(IntVec a) { return vaddvq_s32(a.v); }
inline IntVec round_to_int(Vec a) { return {vcvtnq_s32_f32(a.v)}; }
inline void store_shorts(std::int16_t* p, IntVec a) { vst1_s16(p, vmovn_s32(a.v)); }
inline IntVec pairs_of(IntVec low, IntVec high) {
    return {vbslq_s32(vdupq_n_u32(0xffff), low.v, vshlq_n_s32(high.v, 16))};
}
inline IntVec even_bytes(IntVec a) {
    return from_shorts(vshrq_n_s16(vshlq_n_s16(as_shorts(a), 8), 8));
}
inline IntVec odd_bytes(IntVec a) { return from_shorts(vshrq_n_s16(as_shorts(a), 8)); }
inline IntVec even_unsigned_bytes(IntVec a) { return {vandq_s32(a.v, vdupq_n_s32(0x00ff00ff))}; }
inline IntVec odd_unsigned_bytes(IntVec a) {
    return {vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(a.v), 8))};
}
inline IntVec dot_pairs(IntVec sums, IntVec a, IntVec b) {
    const int16x8_t x = as_shorts(a), y = as_shorts(b);
    const int32x4_t lower = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    return {vaddq_s32(sums.v, vpaddq_s32(lower, vmull_high_s16(x, y)))};
}
inline IntVec byte_of(IntVec a, int place) {
    return {vshrq_n_s32(vshlq_s32(a.v, vdupq_n_s32(24 - 8 * place)), 24)};
}
inline IntVec nibble_of(IntVec a, int place) {
    return {vandq_s32(vshlq_s32(a.v, vdupq_n_s32(-4 * place)), vdupq_n_s32(15))};
}
inline IntVec nibbles(IntVec a, int place) {
    const auto shift = static_cast<std::int8_t>(-4 * place);
    const uint8x16_t shifted = vshlq_u8(vreinterpretq_u8_s32(a.v), vdupq_n_s8(shift));
    return {vreinterpretq_s32_u8(vandq_u8(shifted, vdupq_n_u8(15)))};
}
inline IntVec looked_up(IntVec a, const std::int8_t* table) {
    return {vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(a.v)))};
}
inline IntVec flip_high_bits(IntVec a) {
    return {veorq_s32(a.v, vreinterpretq_s32_u8(vdupq_n_u8(0x80)))};
}

}  // namespace
}  // namespace entropykv
