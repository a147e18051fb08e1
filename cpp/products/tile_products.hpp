// Integer products of a tile: some rows of weights, one a lane, with a few tokens.
#pragma once

#include "products/tile_registers.hpp"

namespace entropykv {
namespace {

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
    const std::byte* at(int token, int step) const {
        return data + static_cast<std::size_t>(token) * stride + 4 * step;
    }
#if defined(__AVX2__)
    Ints of(int token, int step) const { return broadcast_four(at(token, step)); }
#endif
};

template <int kTokens>
inline void clear(TileInts<kTokens>& sums) {
    for (auto& row : sums)
        for (Ints& sum : row) sum = Ints{};
}

}  // namespace
}  // namespace entropykv

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
namespace entropykv {
namespace {

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
                products[t][v] = add_fours(products[t][v], w.v[v], y);
        }
    }
}

}  // namespace
}  // namespace entropykv
#elif defined(__AVX2__)
#include "products/tile_short_sums.hpp"
#else
#include "products/tile_four_steps.hpp"
#endif
