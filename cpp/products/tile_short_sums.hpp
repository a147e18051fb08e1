// Part of tile_products.hpp: integer products without VNNI, which add up in 16 bits for as long as
// they fit.
#pragma once

namespace entropykv {
namespace {

// GCC would make a tree of a long sum of integers, of which no more than half lies in registers.
inline void keep_order(Ints& sum) { __asm__("" : "+x"(sum)); }

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

}  // namespace
}  // namespace entropykv
