// Part of tile_products.hpp: integer products with NEON. Its instructions take the values of a
// token from any quarter of a register, so that one load serves 4 steps.
#pragma once

namespace entropykv {
namespace {

template <int kStep, int kTokens>
inline void add_step(const TileCodes& w, const Ints (&y)[kTokens], TileInts<kTokens>& products) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v)
            products[t][v] = add_fours_of<kStep>(products[t][v], w.v[v], y[t]);
}

// Computes the integer products of a group: of every row of the tile with kTokens tokens.
template <class F, int kTokens, class Codes>
inline void group_products(const Codes& codes, const TokenCodes& tokens,
                           TileInts<kTokens>& products) {
    clear<kTokens>(products);
    for (int outer = 0; outer < Codes::kOuter; ++outer)
#pragma GCC unroll 2
        for (int inner = 0; inner < Codes::kInner; inner += 4) {
            Ints y[kTokens];
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t)
                y[t] = load_ints(tokens.at(t, Codes::step(outer, inner)));
            add_step<0>(codes.at(outer, inner), y, products);
            add_step<1>(codes.at(outer, inner + 1), y, products);
            add_step<2>(codes.at(outer, inner + 2), y, products);
            add_step<3>(codes.at(outer, inner + 3), y, products);
        }
}

}  // namespace
}  // namespace entropykv
