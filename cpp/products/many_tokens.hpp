// Computes products of a tile of rows with many tokens. A panel of columns at a time, the packed
// bytes of the tile are transposed, so that every row has a lane, and codes are unpacked to a byte
// each. Then a few tokens at a time are multiplied with the panel, with their sums in registers. If
// there are so few tokens that each panel is used once, codes of few bits are unpacked only while
// they are multiplied.
#pragma once

#include <algorithm>
#include <type_traits>

#include "products/one_token.hpp"
#include "products/tile_products.hpp"

namespace entropykv {
namespace {

constexpr int kPanelValues = 1024;
constexpr int kSmallestGroup = 16;
constexpr std::size_t kPanelFloats = std::size_t{kTileRows} * kPanelValues / kSmallestGroup;

// Holds the scratch of a tile. Codes: for every 4 values, 4 bytes of each row. Scales and minima:
// for every group, those of each row. Sums: for every token, those of each row.
struct Panel {
    std::byte* codes;
    float* scales;
    float* minima;
    float* sums;
};
constexpr std::size_t kTileBytes = std::size_t{kTileRows} * kPanelValues +
                                   sizeof(float) * (2 * kPanelFloats + kTileTokens * kTileRows);

inline Panel panel_in(std::byte* scratch) {
    auto* floats = reinterpret_cast<float*>(scratch + std::size_t{kTileRows} * kPanelValues);
    return {scratch, floats, floats + kPanelFloats, floats + 2 * kPanelFloats};
}

template <class Type>
using FormOf = Form<Type::kBits, Type::kGroup, Type::kHasMinimum, Type::kZero != 0>;

template <class F>
struct BytePanel {
    static constexpr int kGroupsOfUnit = 1;
    static constexpr std::size_t kUnitBytes = std::size_t{kTileRows} * F::kGroup;
    static ByteCodes<F> group(const std::byte* unit, int) { return {unit}; }
};

template <class Type>
struct PackedPanel {
    static constexpr int kGroupsOfUnit = Type::kUnit / Type::kGroup;
    static constexpr std::size_t kUnitBytes = std::size_t{kTileRows} * Type::kCodeBytes;
    static PackedCodes<Type> group(const std::byte* unit, int i) {
        return {unit, Type::kGroup * i};
    }
};

// Unpacks the codes of a unit to bytes, 4 by 4, for the rows of the registers that load_unit()
// filled.
template <class Type>
inline void unpack_unit(const std::byte* columns, std::byte* codes) {
#pragma GCC unroll 8
    for (int j = 0; j < Type::kUnit / 32; ++j)
#pragma GCC unroll 8
        for (int four = 0; four < 8; ++four, codes += 4 * kTileRows)
#pragma GCC unroll 2
            for (int lane = 0; lane < ColumnRows::kCount; lane += Tile::kLanes)
                store_tile_bytes(codes + 4 * lane,
                                 Type::codes(ColumnCodes(columns + 4 * lane, four), j));
}

// Copies a unit of n_rows rows, fewer than a register has lanes; copies of the last row fill the
// other lanes.
template <class Type>
inline Rows fill_up(const Rows& rows, int n_rows, std::byte* copies) {
    for (int r = 0; r < ColumnRows::kCount; ++r)
        std::memcpy(copies + r * Type::kUnitBytes, rows[std::min(r, n_rows - 1)], Type::kUnitBytes);
    return Rows(copies, Type::kUnitBytes);
}

// Fills lanes [lane, lane + ColumnRows::kCount) of a panel with n_rows rows, and prefetches half of
// as many bytes of the next tile.
template <class Type, bool kPacked>
void fill_lanes(Rows rows, int n_rows, int n_values, const Panel& panel, int lane,
                WeightsAhead<false>& next_tile) {
    constexpr int n_groups = Type::kUnit / Type::kGroup;
    std::byte* codes = panel.codes + 4 * lane;
    float *scales = panel.scales + lane, *minima = panel.minima + lane;
    for (int i = 0; i < n_values; i += Type::kUnit) {
        next_tile.template advance<ColumnRows::kCount * Type::kUnitBytes / 2>();
        std::byte copies[ColumnRows::kCount * Type::kUnitBytes];
        const Rows unit = n_rows < ColumnRows::kCount ? fill_up<Type>(rows, n_rows, copies) : rows;
        if constexpr (kPacked) {
            load_unit<Type>(unit, codes);
            codes += kTileRows * Type::kCodeBytes;
        } else {
            alignas(64) std::byte columns[kTileRows * Type::kCodeBytes];
            load_unit<Type>(unit, columns);
            unpack_unit<Type>(columns, codes);
            codes += kTileRows * Type::kUnit;
        }
        ColumnRows::Floats s[n_groups], m[n_groups];
        Type::template scales<ColumnRows>(unit, s, m);
#pragma GCC unroll 16
        for (int g = 0; g < n_groups; ++g) {
            store_floats(scales + g * kTileRows, s[g]);
            if constexpr (Type::kHasMinimum) store_floats(minima + g * kTileRows, m[g]);
        }
        scales += n_groups * kTileRows;
        minima += n_groups * kTileRows;
        rows = rows.after(Type::kUnitBytes);
    }
}

template <class Type, bool kPacked>
void fill_panel(const Rows& rows, int n_rows, int n_values, const Panel& panel,
                WeightsAhead<false>& next_tile) {
    for (int lane = 0; lane < kTileRows; lane += ColumnRows::kCount) {
        const int first = std::min(lane, n_rows - 1);
        fill_lanes<Type, kPacked>(rows.from(first), std::min(n_rows - first, ColumnRows::kCount),
                                  n_values, panel, lane, next_tile);
    }
}

// Adds the part of group `g` of the products of kTokens tokens to their sums.
template <class F, int kTokens, class Codes>
inline void add_group(const Codes& codes, const Panel& panel, int g, const TokenPart& token,
                      std::size_t stride, Floats (&acc)[kTokens][Tile::kVectors]) {
    const std::size_t float_stride = stride / sizeof(float);
    TileInts<kTokens> products;
    group_products<F, kTokens>(codes, {token.codes + F::kGroup * g, stride}, products);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
        const std::size_t at =
            static_cast<std::size_t>(t) * float_stride + static_cast<std::size_t>(g);
        const Floats scale = broadcast(token.scales[at]);
        const Floats offset = broadcast(token.offsets[at]);
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v) {
            const int lane = g * kTileRows + v * Tile::kLanes;
            const Floats factor = multiply(load_floats(panel.scales + lane), scale);
            Floats whole = to_floats(products[t][v]);
            if constexpr (F::kHasZero) whole = subtract(whole, offset);
            acc[t][v] = multiply_add(whole, factor, acc[t][v]);
            if constexpr (F::kHasMinimum)
                acc[t][v] = multiply_add(load_floats(panel.minima + lane), offset, acc[t][v]);
        }
    }
}

// Adds the part of a panel of the products of kTokens tokens to their sums, and prefetches
// `prefetched` bytes of the next tile with every group.
template <class F, int kTokens, class Codes>
void add_panel(const Panel& panel, int n_groups, const TokenPart& token, std::size_t stride,
               float* sums, WeightsAhead<false>& next_tile, std::size_t prefetched) {
    Floats acc[kTokens][Tile::kVectors];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v)
            acc[t][v] = load_floats(sums + t * kTileRows + v * Tile::kLanes);
    const std::byte* unit = panel.codes;
    for (int g = 0; g < n_groups; g += Codes::kGroupsOfUnit, unit += Codes::kUnitBytes)
#pragma GCC unroll 8
        for (int i = 0; i < Codes::kGroupsOfUnit; ++i) {
            next_tile.advance(prefetched);
            add_group<F, kTokens>(Codes::group(unit, i), panel, g + i, token, stride, acc);
        }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v)
            store_floats(sums + t * kTileRows + v * Tile::kLanes, acc[t][v]);
}

// Takes tokens [first, n_tokens) kTokens at a time, and the rest in smaller steps. The first step
// prefetches the half of the next tile that fill_lanes() has left.
template <class Type, class Codes, int kTokens>
void add_tokens(const Panel& panel, int n_values, int column, int row_values,
                const RoundedTokens& tokens, int first, WeightsAhead<false>& next_tile) {
    constexpr std::size_t kHalfGroup =
        kTileRows * Type::kUnitBytes * Type::kGroup / Type::kUnit / 2;
    for (; first + kTokens <= tokens.n_tokens; first += kTokens) {
        const std::byte* token = tokens.data + static_cast<std::size_t>(first) * tokens.stride;
        add_panel<FormOf<Type>, kTokens, Codes>(
            panel, n_values / Type::kGroup, part_of<Type>(token, row_values, column), tokens.stride,
            panel.sums + static_cast<std::size_t>(first) * kTileRows, next_tile,
            first == 0 ? kHalfGroup : 0);
    }
    if constexpr (kTokens > 1)
        add_tokens<Type, Codes, kTokens / 2>(panel, n_values, column, row_values, tokens, first,
                                             next_tile);
}

template <class Type, bool kPacked>
void multiply_tile(const WeightRows& w, const RoundedTokens& tokens, const Panel& panel) {
    using Codes = std::conditional_t<kPacked, PackedPanel<Type>, BytePanel<FormOf<Type>>>;
    Rows rows(w.data, w.stride);
    WeightsAhead<false> next_tile(w.data + kTileRows * w.stride);
    for (int column = 0; column < w.n_values; column += kPanelValues) {
        const int n_values = std::min(kPanelValues, w.n_values - column);
        fill_panel<Type, kPacked>(rows, w.n_rows, n_values, panel, next_tile);
        rows = rows.after(static_cast<std::size_t>(n_values / Type::kUnit) * Type::kUnitBytes);
        add_tokens<Type, Codes, Tile::kTokens>(panel, n_values, column, w.n_values, tokens, 0,
                                               next_tile);
    }
}

template <class Type>
void many_tokens(const WeightRows& w, const RoundedTokens& tokens, std::byte* scratch, float* out,
                 std::size_t out_stride) {
    const Panel panel = panel_in(scratch);
    std::fill_n(panel.sums, static_cast<std::size_t>(tokens.n_tokens) * kTileRows, 0.0f);
    if (Type::kBits <= Tile::kPackedBits && tokens.n_tokens <= Tile::kTokens)
        multiply_tile<Type, Type::kBits <= Tile::kPackedBits>(w, tokens, panel);
    else
        multiply_tile<Type, false>(w, tokens, panel);
    for (int t = 0; t < tokens.n_tokens; ++t)
        std::copy_n(panel.sums + static_cast<std::size_t>(t) * kTileRows, w.n_rows,
                    out + static_cast<std::size_t>(t) * out_stride);
}

}  // namespace
}  // namespace entropykv
