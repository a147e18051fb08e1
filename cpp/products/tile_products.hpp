// Computes integer products of a tile: some rows of weights, one per lane, with a few tokens.
#pragma once

#include "products/code_bytes.hpp"

namespace entropykv {
namespace {

// Describes what the kernel of a panel must know about a type of weights, so that types which are
// alike share a kernel.
template <int bits, int group, bool has_minimum, bool has_zero>
struct Form {
    static constexpr int kBits = bits, kGroup = group, kSteps = group / 4;
    static constexpr bool kHasMinimum = has_minimum, kHasZero = has_zero;
    // Says how many products of 4 values can be added up before a 16-bit lane overflows.
    static constexpr int kRun = bits == 2 ? 32 : bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
};
template <int kTokens>
using TileInts = Ints[kTokens][Tile::kVectors];

// Holds 4 values of every row of the tile.
struct TileCodes {
    Ints v[Tile::kVectors];
};

// Reads the codes of a group, a byte each, in kOuter * kInner steps of 4 codes.
template <class F>
struct ByteCodes {
    static constexpr int kInner = F::kSteps < 8 ? F::kSteps : 8, kOuter = F::kSteps / kInner;
    const std::byte* codes;

    static int step(int outer, int inner) { return kInner * outer + inner; }
    TileCodes at(int outer, int inner) const {
        TileCodes out;
        for (int i = 0; i < Tile::kVectors; ++i)
            out.v[i] = load_ints(codes + 4 * (kTileRows * step(outer, inner) + Tile::kLanes * i));
        return out;
    }
};

// Reads the codes of a group that are still packed, from value `first` of a unit on, in kOuter *
// kInner steps of 4 codes. Codes that are 32 values apart share bytes.
template <class Type>
struct PackedCodes {
    static constexpr bool kLong = Type::kGroup > 32;
    static constexpr int kInner = Type::kGroup / (kLong ? 32 : 4), kOuter = kLong ? 8 : 1;
    const std::byte* columns;
    int first;

    static int step(int outer, int inner) { return kLong ? 8 * inner + outer : inner; }
    TileCodes at(int outer, int inner) const {
        const int value = first + 4 * step(outer, inner);
        const int four = kLong ? outer : value % 32 / 4;
        TileCodes out;
        for (int i = 0; i < Tile::kVectors; ++i)
            out.v[i] = as_ints(Type::codes(ColumnCodes(columns + 4 * Tile::kLanes * i, four),
                                           kLong ? inner : value / 32));
        return out;
    }
};

// Finds 4 consecutive codes of any token of a panel.
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

// group_products() computes the integer products of a group: of every row of the tile with kTokens
// tokens.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

template <class F, int kTokens, class Codes>
inline void group_products(const Codes& codes, const TokenCodes& tokens,
                           TileInts<kTokens>& products) {
    clear<kTokens>(products);
    for (int outer = 0; outer < Codes::kOuter; ++outer)
#pragma GCC unroll 8
        for (int inner = 0; inner < Codes::kInner; ++inner) {
            const TileCodes w = codes.at(outer, inner);
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) {
                const Ints y = tokens.of(t, Codes::step(outer, inner));
#pragma GCC unroll 2
                for (int v = 0; v < Tile::kVectors; ++v)
                    products[t][v] = add_fours(products[t][v], w.v[v], y);
            }
        }
}

#elif defined(__AVX2__)  // Sums are in 16 bits as long as they fit.

// Keeps GCC from turning a long sum of integers into a tree, only half of which fits into
// registers.
inline void keep_order(Ints& sum) { __asm__("" : "+x"(sum)); }

// Adds the products of signed codes of 8 bits. Two such products fill 16 bits.
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

// 16 bits hold the sums of F::kRun steps.
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

#else  // NEON takes the values of a token from any quarter of a register: one load serves 4 steps

template <int kStep, int kTokens>
inline void add_step(const TileCodes& w, const Ints (&y)[kTokens], TileInts<kTokens>& products) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v)
            products[t][v] = add_fours_of<kStep>(products[t][v], w.v[v], y[t]);
}

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

#endif

}  // namespace
}  // namespace entropykv
