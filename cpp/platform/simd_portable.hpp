// Part of simd.hpp: implements vectors with compiler extensions, 4 floats each, for SSE2 and
// anything else.
#pragma once

#include <cstdint>
#include <cstring>

#include "platform/half.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace entropykv {
namespace {

constexpr int kLanes = 4;
constexpr int kRowVectors = 2;
constexpr int kDecodeBlock = 4;
constexpr int kAccumulators = 12;
constexpr float kVanishing = -127.0f;  // scale_by_power() makes 0 of 2^-127
typedef float FloatLanes __attribute__((vector_size(16)));
typedef std::int32_t IntLanes __attribute__((vector_size(16)));
typedef std::int16_t ShortLanes __attribute__((vector_size(16)));
typedef std::uint16_t UnsignedShortLanes __attribute__((vector_size(16)));
struct Vec {
    FloatLanes v;
};
inline Vec zero() { return {FloatLanes{}}; }
inline Vec broadcast(float x) { return {FloatLanes{x, x, x, x}}; }
inline Vec load(const float* p) {
    Vec a;
    std::memcpy(&a.v, p, sizeof a.v);
    return a;
}
inline void store(float* p, Vec a) { std::memcpy(p, &a.v, sizeof a.v); }
inline Vec load_half(const std::uint16_t* p) {
#if defined(__SSE2__)
    const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const IntLanes bits = (IntLanes)_mm_unpacklo_epi16(halves, _mm_setzero_si128());
#else
    const IntLanes bits{p[0], p[1], p[2], p[3]};
#endif
    // Converts as half_to_float() does.
    const FloatLanes magnitude = (FloatLanes)((bits & 0x7fff) << 13) * 0x1p112f;
    return {(FloatLanes)((IntLanes)magnitude | (bits & 0x8000) << 16)};
}
inline void store_half(std::uint16_t* p, Vec a) {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(a.v[i]);
}
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec maximum(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return {a.v < b.v ? yes.v : no.v}; }
inline bool any_less(Vec a, Vec b) {
    const IntLanes less = a.v < b.v;
    for (int i = 0; i < kLanes; ++i)
        if (less[i] != 0) return true;
    return false;
}
inline Vec round_nearest(Vec a) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    return {(a.v + magic) - magic};
}
inline Vec even_lanes(Vec a, Vec b) { return {FloatLanes{a.v[0], a.v[2], b.v[0], b.v[2]}}; }
inline Vec odd_lanes(Vec a, Vec b) { return {FloatLanes{a.v[1], a.v[3], b.v[1], b.v[3]}}; }
inline Vec scale_by_power(Vec a, Vec power) {
    const IntLanes exponent = (__builtin_convertvector(power.v, IntLanes) + 127) << 23;
    FloatLanes factor;
    std::memcpy(&factor, &exponent, sizeof factor);
    return {a.v * factor};
}
inline float sum(Vec a) {
    float total = 0.0f;
    for (int i = 0; i < kLanes; ++i) total += a.v[i];
    return total;
}
inline float largest(Vec a) {
    float best = a.v[0];
    for (int i = 1; i < kLanes; ++i) best = a.v[i] > best ? a.v[i] : best;
    return best;
}

struct IntVec {
    IntLanes v;
};
inline IntVec broadcast_int(std::int32_t x) { return {IntLanes{x, x, x, x}}; }
inline IntVec load_ints(const void* p) {
    IntVec a;
    std::memcpy(&a.v, p, sizeof a.v);
    return a;
}
inline void store_ints(void* p, IntVec a) { std::memcpy(p, &a.v, sizeof a.v); }
inline Vec to_float(IntVec a) { return {__builtin_convertvector(a.v, FloatLanes)}; }
inline IntVec operator+(IntVec a, IntVec b) { return {a.v + b.v}; }
inline std::int32_t sum(IntVec a) { return a.v[0] + a.v[1] + a.v[2] + a.v[3]; }
inline IntVec round_to_int(Vec a) {
    return {__builtin_convertvector(round_nearest(a).v, IntLanes)};
}
inline void store_shorts(std::int16_t* p, IntVec a) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<std::int16_t>(a.v[i]);
}
inline IntVec pairs_of(IntVec low, IntVec high) { return {(low.v & 0xffff) | high.v << 16}; }
inline IntVec even_bytes(IntVec a) { return {(IntLanes)((ShortLanes)a.v << 8 >> 8)}; }
inline IntVec odd_bytes(IntVec a) { return {(IntLanes)((ShortLanes)a.v >> 8)}; }
inline IntVec even_unsigned_bytes(IntVec a) { return {a.v & 0x00ff00ff}; }
inline IntVec odd_unsigned_bytes(IntVec a) { return {(IntLanes)((UnsignedShortLanes)a.v >> 8)}; }
inline IntVec dot_pairs(IntVec sums, IntVec a, IntVec b) {
#if defined(__SSE2__)
    return {sums.v + (IntLanes)_mm_madd_epi16((__m128i)a.v, (__m128i)b.v)};
#else
    const IntLanes low = (a.v << 16 >> 16) * (b.v << 16 >> 16);
    return {sums.v + low + (a.v >> 16) * (b.v >> 16)};
#endif
}
inline IntVec byte_of(IntVec a, int place) { return {a.v << (24 - 8 * place) >> 24}; }
inline IntVec nibble_of(IntVec a, int place) { return {a.v >> 4 * place & 15}; }
inline IntVec nibbles(IntVec a, int place) { return {a.v >> 4 * place & 0x0f0f0f0f}; }
inline IntVec looked_up(IntVec a, const std::int8_t* table) {
    std::uint8_t codes[16];
    std::int8_t found[16];
    std::memcpy(codes, &a.v, sizeof codes);
    for (int i = 0; i < 16; ++i) found[i] = table[codes[i]];
    std::memcpy(&a.v, found, sizeof found);
    return a;
}
inline IntVec flip_high_bits(IntVec a) { return {a.v ^ static_cast<std::int32_t>(0x80808080u)}; }

}  // namespace
}  // namespace entropykv
