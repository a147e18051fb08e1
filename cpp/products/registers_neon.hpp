// Part of eight_rows.hpp: implements registers as pairs of 128-bit NEON registers, with dot
// products if the compiler may use them.
#pragma once

#include <arm_neon.h>

namespace entropykv {
namespace {

constexpr bool kSignedCodes = true;

struct RowBytes {
    uint8x16_t lower, upper;
};
using HalfBytes = uint8x16_t;
struct RowInts {
    int32x4_t lower, upper;
};
struct RowFloats {
    float32x4_t lower, upper;
};

inline HalfBytes load16(const std::byte* p) {
    return vld1q_u8(reinterpret_cast<const std::uint8_t*>(p));
}
inline RowBytes load32(const std::byte* p) { return {load16(p), load16(p + 16)}; }
inline HalfBytes four_bytes(const std::byte* p) {
    return vreinterpretq_u8_u32(vdupq_n_u32(load_as<std::uint32_t>(p)));
}
inline void store32(std::byte* p, RowBytes a) {
    vst1q_u8(reinterpret_cast<std::uint8_t*>(p), a.lower);
    vst1q_u8(reinterpret_cast<std::uint8_t*>(p) + 16, a.upper);
}
inline RowBytes pair(HalfBytes lower, HalfBytes upper) { return {lower, upper}; }
inline HalfBytes first_fours(HalfBytes a, HalfBytes b, HalfBytes c, HalfBytes d) {
    const auto lower = vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
    const auto upper = vzip1q_u32(vreinterpretq_u32_u8(c), vreinterpretq_u32_u8(d));
    return vcombine_u8(vreinterpret_u8_u32(vget_low_u32(lower)),
                       vreinterpret_u8_u32(vget_low_u32(upper)));
}
inline RowBytes nibbles(HalfBytes a) { return {vandq_u8(a, vdupq_n_u8(15)), vshrq_n_u8(a, 4)}; }
inline HalfBytes field(HalfBytes a, int shift, int mask) {
    const HalfBytes shifted = a >> static_cast<std::uint8_t>(shift);
    return mask == 255 >> shift ? shifted : vandq_u8(shifted, vdupq_n_u8(mask));
}
inline RowBytes field(RowBytes a, int shift, int mask) {
    return {field(a.lower, shift, mask), field(a.upper, shift, mask)};
}
inline HalfBytes with_upper(HalfBytes low, HalfBytes high, int shift) {
    return vorrq_u8(low, high << static_cast<std::uint8_t>(shift));
}
inline RowBytes with_upper(RowBytes low, RowBytes high, int shift) {
    return {with_upper(low.lower, high.lower, shift), with_upper(low.upper, high.upper, shift)};
}
inline RowBytes bits_of(std::uint32_t bits) {
    const HalfBytes bit_of_lane = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    const auto half = [&](std::uint64_t first, std::uint64_t second) {
        const HalfBytes byte_of_lane = vcombine_u8(vcreate_u8(first), vcreate_u8(second));
        const HalfBytes bytes = vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(bits)), byte_of_lane);
        return vshrq_n_u8(vtstq_u8(bytes, bit_of_lane), 7);
    };
    return {half(0, 0x0101010101010101), half(0x0202020202020202, 0x0303030303030303)};
}
inline HalfBytes flip_signs(HalfBytes a) { return veorq_u8(a, vdupq_n_u8(0x80)); }
inline RowBytes flip_signs(RowBytes a) { return {flip_signs(a.lower), flip_signs(a.upper)}; }
inline HalfBytes three_times(HalfBytes a) { return vaddq_u8(a, vaddq_u8(a, a)); }
inline RowBytes three_times(RowBytes a) { return {three_times(a.lower), three_times(a.upper)}; }
inline HalfBytes three_quarters(HalfBytes a) {
    const HalfBytes none = vdupq_n_u8(0);
    return vsubq_u8(a, vrhaddq_u8(vrhaddq_u8(a, none), none));
}
inline RowBytes three_quarters(RowBytes a) {
    return {three_quarters(a.lower), three_quarters(a.upper)};
}

inline RowFloats same_floats(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline void store_floats(float* p, RowFloats a) {
    vst1q_f32(p, a.lower);
    vst1q_f32(p + 4, a.upper);
}
inline RowFloats to_floats(RowInts a) { return {vcvtq_f32_s32(a.lower), vcvtq_f32_s32(a.upper)}; }
inline RowFloats subtract(RowFloats a, RowFloats b) {
    return {vsubq_f32(a.lower, b.lower), vsubq_f32(a.upper, b.upper)};
}
inline RowFloats multiply(RowFloats a, RowFloats b) {
    return {vmulq_f32(a.lower, b.lower), vmulq_f32(a.upper, b.upper)};
}
inline RowFloats multiply_add(RowFloats a, RowFloats b, RowFloats c) {
    return {vfmaq_f32(c.lower, a.lower, b.lower), vfmaq_f32(c.upper, a.upper, b.upper)};
}
// `to_half` moves the wanted f16 of four values to the lower 16 bits.
template <typename ToHalf>
inline RowFloats halves_of(RowBytes a, ToHalf to_half) {
    const uint16x4_t lower = to_half(vreinterpretq_u32_u8(a.lower));
    const uint16x4_t upper = to_half(vreinterpretq_u32_u8(a.upper));
    return {vcvt_f32_f16(vreinterpret_f16_u16(lower)), vcvt_f32_f16(vreinterpret_f16_u16(upper))};
}
inline RowFloats low_halves(RowBytes a) {
    return halves_of(a, [](uint32x4_t x) { return vmovn_u32(x); });
}
inline RowFloats high_halves(RowBytes a) {
    return halves_of(a, [](uint32x4_t x) { return vshrn_n_u32(x, 16); });
}
inline float32x4_t unsigned_bytes(HalfBytes a, int k) {
    const uint32x4_t shifted = vreinterpretq_u32_u8(a) >> static_cast<std::uint32_t>(8 * k);
    return vcvtq_f32_u32(vandq_u32(shifted, vdupq_n_u32(255)));
}
inline RowFloats unsigned_bytes(RowBytes a, int k) {
    return {unsigned_bytes(a.lower, k), unsigned_bytes(a.upper, k)};
}
inline float32x4_t signed_bytes(HalfBytes a, int k) {
    const int32x4_t shifted = vreinterpretq_s32_u8(a) << (24 - 8 * k);
    return vcvtq_f32_s32(vshrq_n_s32(shifted, 24));
}
inline RowFloats signed_bytes(RowBytes a, int k) {
    return {signed_bytes(a.lower, k), signed_bytes(a.upper, k)};
}

inline void transpose_four(const uint32x4_t (&a)[4], uint32x4_t (&columns)[4]) {
    const uint64x2_t b0 = vreinterpretq_u64_u32(vtrn1q_u32(a[0], a[1]));
    const uint64x2_t b1 = vreinterpretq_u64_u32(vtrn2q_u32(a[0], a[1]));
    const uint64x2_t b2 = vreinterpretq_u64_u32(vtrn1q_u32(a[2], a[3]));
    const uint64x2_t b3 = vreinterpretq_u64_u32(vtrn2q_u32(a[2], a[3]));
    columns[0] = vreinterpretq_u32_u64(vtrn1q_u64(b0, b2));
    columns[1] = vreinterpretq_u32_u64(vtrn1q_u64(b1, b3));
    columns[2] = vreinterpretq_u32_u64(vtrn2q_u64(b0, b2));
    columns[3] = vreinterpretq_u32_u64(vtrn2q_u64(b1, b3));
}
struct EightRows {
    static constexpr int kCount = kRows;
    using Bytes = RowBytes;
    using Floats = RowFloats;

    template <class R>
    static Floats halves(const R& rows, std::size_t offset) {
        std::uint16_t halves[kRows];
        for (int r = 0; r < kRows; ++r) halves[r] = load_as<std::uint16_t>(rows[r] + offset);
        const float16x8_t all = vreinterpretq_f16_u16(vld1q_u16(halves));
        return {vcvt_f32_f16(vget_low_f16(all)), vcvt_high_f32_f16(all)};
    }
    template <class R>
    static void two_halves(const R& rows, std::size_t offset, Floats& first, Floats& second) {
        first = halves(rows, offset);
        second = halves(rows, offset + sizeof(std::uint16_t));
    }
    template <class R>
    static void columns(const R& rows, std::size_t offset, Bytes (&columns)[4]) {
        uint32x4_t halves[2][4];
        for (int half = 0; half < 2; ++half) {
            uint32x4_t a[4];
            for (int i = 0; i < 4; ++i)
                a[i] = vreinterpretq_u32_u8(load16(rows[4 * half + i] + offset));
            transpose_four(a, halves[half]);
        }
        for (int i = 0; i < 4; ++i)
            columns[i] = {vreinterpretq_u8_u32(halves[0][i]), vreinterpretq_u8_u32(halves[1][i])};
    }
    static void store(std::byte* p, Bytes a) { store32(p, a); }
};

// Returns sums + the products of 16 codes and activations, added up in fours.
inline int32x4_t add_fours(int32x4_t sums, int8x16_t codes, int8x16_t activations) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sums, codes, activations);
#else
    const int16x8_t lower = vmull_s8(vget_low_s8(codes), vget_low_s8(activations));
    return vpadalq_s16(sums, vpaddq_s16(lower, vmull_high_s8(codes, activations)));
#endif
}

// If halves need not be kept apart, all sums are in `lower`.
struct Partial {
    int32x4_t lower, upper;
};
inline Partial no_products() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }

template <int kBits, bool kSplit>
inline Partial add_products(Partial sums, RowBytes codes, RowBytes activations) {
    const auto add = [](int32x4_t to, uint8x16_t a, uint8x16_t b) {
        return add_fours(to, vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b));
    };
    const int32x4_t lower = add(sums.lower, codes.lower, activations.lower);
    if constexpr (!kSplit) return {add(lower, codes.upper, activations.upper), sums.upper};
    return {lower, add(sums.upper, codes.upper, activations.upper)};
}

inline int32x4_t reduce_four(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
    return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}

template <int kBits>
inline RowInts reduce(const Partial (&p)[kRows]) {
    return {reduce_four(p[0].lower, p[1].lower, p[2].lower, p[3].lower),
            reduce_four(p[4].lower, p[5].lower, p[6].lower, p[7].lower)};
}

template <int kBits>
inline void reduce_halves(const Partial (&p)[kRows], RowInts& lower, RowInts& upper) {
    lower = reduce<kBits>(p);
    upper = {reduce_four(p[0].upper, p[1].upper, p[2].upper, p[3].upper),
             reduce_four(p[4].upper, p[5].upper, p[6].upper, p[7].upper)};
}

// Read as integers, magnitudes have the same order as floats; NaN is above all others and stays.
inline float largest_magnitude(const float* x, int n) {
    const int32x4_t magnitude = vdupq_n_s32(0x7fffffff);
    int32x4_t most = vdupq_n_s32(0);
    for (int i = 0; i < n; i += 4)
        most = vmaxq_s32(most, vandq_s32(vreinterpretq_s32_f32(vld1q_f32(x + i)), magnitude));
    return vgetq_lane_f32(vreinterpretq_f32_s32(vdupq_n_s32(vmaxvq_s32(most))), 0);
}

inline int round_16(const float* x, float inverse, std::byte* codes) {
    const auto four = [&](int i) { return vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), inverse)); };
    const int16x8_t a = vcombine_s16(vqmovn_s32(four(0)), vqmovn_s32(four(4)));
    const int16x8_t b = vcombine_s16(vqmovn_s32(four(8)), vqmovn_s32(four(12)));
    vst1q_s8(reinterpret_cast<std::int8_t*>(codes), vcombine_s8(vqmovn_s16(a), vqmovn_s16(b)));
    return vaddvq_s16(vaddq_s16(a, b));
}

}  // namespace
}  // namespace entropykv
