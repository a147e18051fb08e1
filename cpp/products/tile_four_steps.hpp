// Part of tile_products.hpp: integer products of NEON, whose instructions take a token's values
// from any quarter of a register: it is loaded once for 4 steps.
#pragma once

namespace entropykv {
namespace {

template <int kStep, int kTokens>
inline void add_step(const std::byte* codes, const Ints (&y)[kTokens],
                     TileInts<kTokens>& products) {
    const TileCodes w(codes + 4 * kTileRows * kStep);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v)
            products[t][v] = add_fours_of<kStep>(products[t][v], w.v[v], y[t]);
}

// Integer products of a group: of every row of the tile with kTokens tokens.
template <class F, int kTokens>
inline void group_products(const std::byte* codes, const TokenCodes& tokens,
                           TileInts<kTokens>& products) {
    clear<kTokens>(products);
#pragma GCC unroll 2
    for (int step = 0; step < F::kSteps; step += 4) {
        Ints y[kTokens];
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) y[t] = load_ints(tokens.at(t, step));
        const std::byte* w = codes + 4 * kTileRows * step;
        add_step<0>(w, y, products);
        add_step<1>(w, y, products);
        add_step<2>(w, y, products);
        add_step<3>(w, y, products);
    }
}

}  // namespace
}  // namespace entropykv
