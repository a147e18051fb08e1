// Part of tile_products.hpp: integer products without VNNI, which are added up in 16 bits as long
// as they fit.
#pragma once

namespace entropykv {
namespace {

// Keeps GCC from turning a long sum of integers into a tree, only half of which fits into
// registers.
inline void keep_order(Ints& sum) { __asm__("" : "+x"(sum)); }

// Works on signed codes of 8 bits, of which two products fill 16 bits.
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

// Adds the 16-bit sums to the 32-bit sums, and clears them.
template <int kTokens>
inline void widen_sums(TileInts<kTokens>& shorts, TileInts<kTokens>& products) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v) {
            products[t][v] = _mm256_add_epi32(products[t][v], widen(shorts[t][v]));
            shorts[t][v] = Ints{};
        }
}

// Computes the integer products of a group: of every row of the tile with kTokens tokens. 16 bits
// hold the sums of F::kRun steps.
template <class F, int kTokens, class Codes>
inline void group_products(const Codes& codes, const TokenCodes& tokens,
                           TileInts<kTokens>& products) {
    clear<kTokens>(products);
    TileInts<kTokens> shorts;
    clear<kTokens>(shorts);
    for (int outer = 0; outer < Codes::kOuter; ++outer) {
#pragma GCC unroll 8
        for (int inner = 0; inner < Codes::kInner; ++inner) {
            const TileCodes w = codes.at(outer, inner);
            const int step = Codes::step(outer, inner);
            if constexpr (F::kBits == 8) {
                add_signed<kTokens>(w, tokens, step, products);
                continue;
            }
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) {
                const Ints y = tokens.of(t, step);
#pragma GCC unroll 2
                for (int v = 0; v < Tile::kVectors; ++v) {
                    shorts[t][v] = _mm256_add_epi16(shorts[t][v], _mm256_maddubs_epi16(w.v[v], y));
                    keep_order(shorts[t][v]);
                }
            }
            if (F::kRun < Codes::kInner && (inner + 1) % F::kRun == 0)
                widen_sums<kTokens>(shorts, products);
        }
        if (F::kRun >= Codes::kInner && F::kBits != 8 && (outer + 1) * Codes::kInner % F::kRun == 0)
            widen_sums<kTokens>(shorts, products);
    }
}

}  // namespace
}  // namespace entropykv
