// Integer products of a tile: some rows of weights, one a lane, with a few tokens. The registers
// are those of the instruction set, under the same names.
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
inline Ints broadcast_four(const std::byte* p) {
    return _mm512_set1_epi32(load_as<std::int32_t>(p));
}
inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline void store_floats(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#else
struct Tile {
    static constexpr int kLanes = 8, kVectors = 2, kTokens = 4;
};
using Ints = __m256i;
using Floats = __m256;
inline Ints load_ints(const std::byte* p) { return load32(p); }
// GCC would make a tree of a long sum of integers, of which no more than half lies in registers.
inline void keep_order(Ints& sum) { __asm__("" : "+x"(sum)); }
inline Ints broadcast_four(const std::byte* p) {
    return _mm256_set1_epi32(load_as<std::int32_t>(p));
}
inline Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
inline void store_floats(float* p, Floats a) { _mm256_storeu_ps(p, a); }
inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#endif

constexpr int kTileRows = Tile::kLanes * Tile::kVectors;

// What the kernel of a panel has to know of a type: several share one.
template <int bits, int group, bool has_minimum, bool has_zero>
struct Form {
    static constexpr int kBits = bits, kGroup = group, kSteps = group / 4;
    static constexpr bool kHasMinimum = has_minimum, kHasZero = has_zero;
    // Products of 4 values each that may be added up before a 16-bit lane overflows.
    static constexpr int kRun = bits == 2 ? 32 : bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
};
template <int kTokens>
using TileInts = Ints[kTokens][Tile::kVectors];

// 4 values of every row of the tile.
struct TileCodes {
    Ints v[Tile::kVectors];
    explicit TileCodes(const std::byte* codes) {
        for (int i = 0; i < Tile::kVectors; ++i) v[i] = load_ints(codes + 4 * Tile::kLanes * i);
    }
};

// 4 values of every token.
struct TokenCodes {
    const std::byte* data;
    std::size_t stride;
    Ints of(int token, int step) const {
        return broadcast_four(data + static_cast<std::size_t>(token) * stride + 4 * step);
    }
};

template <int kTokens>
inline void clear(TileInts<kTokens>& sums) {
    for (auto& row : sums)
        for (Ints& sum : row) sum = Ints{};
}

#if defined(__AVX512VNNI__)
// Integer products of a group: of every row of the tile with kTokens tokens.
template <class F, int kTokens>
inline void group_products(const std::byte* codes, const TokenCodes& tokens,
                           TileInts<kTokens>& products) {
    clear<kTokens>(products);
#pragma GCC unroll 8
    for (int step = 0; step < F::kSteps; ++step) {
        const TileCodes w(codes + 4 * kTileRows * step);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
            const Ints y = tokens.of(t, step);
#pragma GCC unroll 2
            for (int v = 0; v < Tile::kVectors; ++v)
                products[t][v] = _mm512_dpbusd_epi32(products[t][v], w.v[v], y);
        }
    }
}
#else
// Of signed codes of 8 bits: two products fill 16 bits.
template <int kTokens>
inline void add_signed(const TileCodes& w, const TokenCodes& tokens, int step,
                       TileInts<kTokens>& products) {
    Ints magnitudes[Tile::kVectors];
    for (int v = 0; v < Tile::kVectors; ++v) magnitudes[v] = _mm256_abs_epi8(w.v[v]);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
        const Ints y = tokens.of(t, step);
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v) {
            const Ints pairs = _mm256_maddubs_epi16(magnitudes[v], _mm256_sign_epi8(y, w.v[v]));
            products[t][v] = _mm256_add_epi32(products[t][v], widen(pairs));
            keep_order(products[t][v]);
        }
    }
}

// Of F::kRun steps, in 16 bits.
template <class F, int kTokens>
inline void add_run(const std::byte* codes, const TokenCodes& tokens, int first,
                    TileInts<kTokens>& products) {
    TileInts<kTokens> shorts;
    clear<kTokens>(shorts);
#pragma GCC unroll 8
    for (int step = first; step < first + F::kRun; ++step) {
        const TileCodes w(codes + 4 * kTileRows * step);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
            const Ints y = tokens.of(t, step);
#pragma GCC unroll 2
            for (int v = 0; v < Tile::kVectors; ++v) {
                shorts[t][v] = _mm256_add_epi16(shorts[t][v], _mm256_maddubs_epi16(w.v[v], y));
                keep_order(shorts[t][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v)
            products[t][v] = _mm256_add_epi32(products[t][v], widen(shorts[t][v]));
}

// Integer products of a group: of every row of the tile with kTokens tokens.
template <class F, int kTokens>
inline void group_products(const std::byte* codes, const TokenCodes& tokens,
                           TileInts<kTokens>& products) {
    clear<kTokens>(products);
    if constexpr (F::kBits == 8) {
        for (int step = 0; step < F::kSteps; ++step)
            add_signed<kTokens>(TileCodes(codes + 4 * kTileRows * step), tokens, step, products);
    } else {
        for (int first = 0; first < F::kSteps; first += F::kRun)
            add_run<F, kTokens>(codes, tokens, first, products);
    }
}
#endif

}  // namespace
}  // namespace entropykv
