// Defines registers over 16 rows of weights for AVX-512 with VNNI, with names of eight_rows.hpp.
#pragma once

#include "products/eight_rows.hpp"

#if defined(__AVX512VNNI__)
namespace entropykv {
namespace {

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

using TileBytes = __m512i;
inline TileBytes load_tile_bytes(const std::byte* p) { return _mm512_loadu_si512(p); }
inline void store_tile_bytes(std::byte* p, TileBytes a) { _mm512_storeu_si512(p, a); }
inline Ints as_ints(TileBytes a) { return a; }
inline TileBytes field(TileBytes a, int shift, int mask) {
    const __m512i shifted = shift == 0 ? a : _mm512_srli_epi16(a, static_cast<unsigned>(shift));
    return _mm512_and_si512(shifted, _mm512_set1_epi8(static_cast<char>(mask)));
}
inline TileBytes with_upper(TileBytes low, TileBytes high, int shift) {
    return _mm512_or_si512(low, _mm512_slli_epi16(high, static_cast<unsigned>(shift)));
}
inline TileBytes flip_signs(TileBytes a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }
inline TileBytes three_times(TileBytes a) { return _mm512_add_epi8(a, _mm512_add_epi8(a, a)); }
inline TileBytes three_quarters(TileBytes a) {
    const __m512i none = _mm512_setzero_si512();
    return _mm512_sub_epi8(a, _mm512_avg_epu8(_mm512_avg_epu8(a, none), none));
}
inline TileBytes four_bits(TileBytes column, int four) {
    const __m512i byte_of_lane = _mm512_add_epi8(
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)),
        _mm512_set1_epi8(static_cast<char>(four / 2)));
    const __m512i bit_of_lane = _mm512_set1_epi32(four % 2 == 0 ? 0x08040201 : int(0x80402010));
    return _mm512_maskz_set1_epi8(
        _mm512_test_epi8_mask(_mm512_shuffle_epi8(column, byte_of_lane), bit_of_lane), 1);
}

inline Floats low_halves(TileBytes a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
inline Floats high_halves(TileBytes a) { return low_halves(_mm512_srli_epi32(a, 16)); }
inline Floats unsigned_bytes(TileBytes a, int k) {
    return to_floats(_mm512_and_si512(_mm512_srli_epi32(a, static_cast<unsigned>(8 * k)),
                                      _mm512_set1_epi32(255)));
}
inline Floats signed_bytes(TileBytes a, int k) {
    return to_floats(
        _mm512_srai_epi32(_mm512_slli_epi32(a, static_cast<unsigned>(24 - 8 * k)), 24));
}

struct SixteenRows {
    static constexpr int kCount = 16;
    using Bytes = TileBytes;
    using Floats = entropykv::Floats;

    static Floats halves(const Rows& rows, std::size_t offset) {
        return _mm512_cvtph_ps(
            pair(eight_halves(rows, offset), eight_halves(rows.from(8), offset)));
    }
    static void two_halves(const Rows& rows, std::size_t offset, Floats& first, Floats& second) {
        const auto four = [&](int row) { return four_of_four(rows.from(row), offset); };
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(pair(four(0), four(4))),
                                                pair(four(8), four(12)), 1);
        first = low_halves(both);
        second = high_halves(both);
    }
    static void columns(const Rows& rows, std::size_t offset, Bytes (&columns)[4]) {
        const Rows first = rows.after(offset), second = first.from(4);
        const Rows third = first.from(8), fourth = second.from(8);
        __m512i a[4], b[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m256i lower = pair(load16(first.near(i)), load16(second.near(i)));
            const __m256i upper = pair(load16(third.near(i)), load16(fourth.near(i)));
            a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            columns[2 * i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            columns[2 * i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        }
    }
    static void store(std::byte* p, Bytes a) { store_tile_bytes(p, a); }
};

}  // namespace
}  // namespace entropykv
#endif
