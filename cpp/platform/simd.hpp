// Defines one vector of floats per instruction set behind common names. The kernels are written
// once with it, and CMake compiles them once per instruction set. Everything is in an unnamed
// namespace, so that no function built for one instruction set is ever linked into the code for
// another one.
#pragma once

#include "platform/half.hpp"

#if defined(__AVX512F__)
#include "platform/simd_avx512.hpp"
#elif defined(__AVX2__)
#include "platform/simd_avx2.hpp"
#elif defined(ENTROPYKV_NEON)
#include "platform/simd_neon.hpp"
#else
#include "platform/simd_portable.hpp"
#endif

namespace entropykv {
namespace {

// even_lanes and odd_lanes return every second lane of two vectors, those of the first one first.

// IntVec is a register of packed values; page_layout.hpp defines the order of bytes. even_bytes and
// odd_bytes return two pairs of 16-bit integers per 32-bit lane, dot_pairs adds the products of
// such pairs to 32-bit sums, pairs_of makes pairs of two vectors, byte_of returns one byte of every
// lane as an integer, nibble_of 4 bits (unsigned), the lowest first. nibbles returns one half of
// every byte (0: the low one), and looked_up the bytes of a table of 16 at these places.

// Says whether dot_pairs computes more products per second than multiply_add. As measured, it does
// on x86 with every instruction set.
#if defined(__SSE2__)
constexpr bool kFastPairs = true;
#else
constexpr bool kFastPairs = false;
#endif

inline IntVec broadcast_pair(const std::int16_t* p) {
    std::int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return broadcast_int(pair);
}

// Prefetches into the second-level cache.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

#if !defined(__AVX512F__)
// Returns in lane i the sum of vector i of kLanes vectors.
inline Vec sums_of(const Vec* of) {
    float sums[kLanes];
    for (int i = 0; i < kLanes; ++i) sums[i] = sum(of[i]);
    return load(sums);
}

// Moves entries of a group, row by row: a row has one value of every entry. from, to, n: see
// LaneMoves.
class LaneMap {
public:
    LaneMap(const std::uint8_t* from, const std::uint8_t* to, int n)
        : from_(from), to_(to), n_(n) {}
    template <typename T>
    void move(const T* from, T* to) const {
        for (int i = 0; i < n_; ++i) to[to_[i]] = from[from_[i]];
    }

private:
    const std::uint8_t* from_;
    const std::uint8_t* to_;
    int n_;
};
#endif

constexpr float kLog2E = 1.44269504f;

// Returns 2^x for x <= 126 with a relative error of 1.5e-7. 2^0 is exactly 1, and below kVanishing
// the result is exactly 0.
inline Vec power_of_two(Vec x) {
    const Vec bounded = maximum(x, broadcast(kVanishing));
    const Vec power = round_nearest(bounded);
    const Vec r = bounded - power;
    Vec p = broadcast(1.327647164e-3f);  // minimax for |r| <= 1/2
    p = multiply_add(p, r, broadcast(9.675541332e-3f));
    p = multiply_add(p, r, broadcast(5.550713275e-2f));
    p = multiply_add(p, r, broadcast(2.402211972e-1f));
    p = multiply_add(p, r, broadcast(6.931469671e-1f));
    p = multiply_add(p, r, broadcast(1.0f));
    return scale_by_power(p, power);
}

inline Vec exponential(Vec x) { return power_of_two(x * broadcast(kLog2E)); }

// Returns cap * tanh(x / cap), the logit soft-cap of gemma2.
inline Vec soft_cap(Vec x, float cap) {
    Vec twice = x * broadcast(2.0f / cap);
    const Vec limit = broadcast(20.0f);  // tanh is 1 in float from 10 on
    twice = where_less(limit, twice, limit, twice);
    const Vec e = exponential(twice);
    const Vec one = broadcast(1.0f);
    return broadcast(cap) * ((e - one) / (e + one));
}

}  // namespace
}  // namespace entropykv
