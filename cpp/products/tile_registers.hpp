// Defines the registers of a tile of rows of weights and tokens, with one row per lane and the same
// names on every instruction set. AVX2 uses those of 8 rows: see eight_rows.hpp. For up to kTokens
// tokens, codes of up to kPackedBits bits are unpacked while they are multiplied. That takes more
// registers than AVX2 has, and has not been timed with NEON.
#pragma once

#include "products/eight_rows.hpp"
#include "products/sixteen_rows.hpp"

namespace entropykv {
namespace {

#if defined(__AVX512VNNI__)
struct Tile {
    static constexpr int kLanes = 16, kVectors = 2, kTokens = 8, kPackedBits = 4;
};
#elif defined(__AVX2__)
struct Tile {
    static constexpr int kLanes = 8, kVectors = 2, kTokens = 4, kPackedBits = 0;
};
using Ints = RowInts;
using Floats = RowFloats;
inline Ints load_ints(const std::byte* p) { return load32(p); }
inline Ints broadcast_four(const std::byte* p) { return _mm256_set1_epi32(load_as<int>(p)); }
inline Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
inline Floats broadcast(float x) { return same_floats(x); }

using TileBytes = RowBytes;
inline TileBytes load_tile_bytes(const std::byte* p) { return load32(p); }
inline void store_tile_bytes(std::byte* p, TileBytes a) { store32(p, a); }
inline Ints as_ints(TileBytes a) { return a; }
inline TileBytes four_bits(TileBytes column, int four) {
    const __m256i byte_of_lane =
        _mm256_add_epi8(_mm256_broadcastsi128_si256(
                            _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)),
                        _mm256_set1_epi8(static_cast<char>(four / 2)));
    const __m256i bit_of_lane = _mm256_set1_epi32(four % 2 == 0 ? 0x08040201 : int(0x80402010));
    const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(column, byte_of_lane), bit_of_lane);
    return _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit_of_lane), _mm256_set1_epi8(1));
}
#else
struct Tile {
    static constexpr int kLanes = 4, kVectors = 2, kTokens = 4, kPackedBits = 0;
};
using Ints = int32x4_t;
using Floats = float32x4_t;
inline Ints load_ints(const std::byte* p) { return vreinterpretq_s32_u8(load16(p)); }

using TileBytes = HalfBytes;
inline TileBytes load_tile_bytes(const std::byte* p) { return load16(p); }
inline void store_tile_bytes(std::byte* p, TileBytes a) {
    vst1q_u8(reinterpret_cast<std::uint8_t*>(p), a);
}
inline Ints as_ints(TileBytes a) { return vreinterpretq_s32_u8(a); }
inline TileBytes four_bits(TileBytes column, int four) {
    const HalfBytes byte_of_lane =
        vaddq_u8(vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(0x0404040400000000),
                                                   vcreate_u64(0x0c0c0c0c08080808))),
                 vdupq_n_u8(static_cast<std::uint8_t>(four / 2)));
    const HalfBytes bit_of_lane =
        vreinterpretq_u8_u32(vdupq_n_u32(four % 2 == 0 ? 0x08040201u : 0x80402010u));
    return vshrq_n_u8(vtstq_u8(vqtbl1q_u8(column, byte_of_lane), bit_of_lane), 7);
}
inline Floats load_floats(const float* p) { return vld1q_f32(p); }
inline void store_floats(float* p, Floats a) { vst1q_f32(p, a); }
inline Floats broadcast(float x) { return vdupq_n_f32(x); }
inline Floats to_floats(Ints a) { return vcvtq_f32_s32(a); }
inline Floats subtract(Floats a, Floats b) { return vsubq_f32(a, b); }
inline Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
// Returns sums + codes times activations 4 kStep to 4 kStep + 3 of 16.
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

#if defined(__AVX512VNNI__)
using ColumnRows = SixteenRows;
#else
using ColumnRows = EightRows;
#endif
constexpr int kTileRows = Tile::kLanes * Tile::kVectors;

}  // namespace
}  // namespace entropykv
