// Products of a tile of rows with many tokens. The codes of the tile are unpacked to bytes, a panel
// of columns at a time, with one row a lane; then every few tokens go through the panel, their sums
// in registers.
#pragma once

#include <algorithm>

#include "products/one_token.hpp"
#include "products/tile_products.hpp"

namespace entropykv {
namespace {

constexpr int kPanelValues = 1024;
constexpr int kSmallestGroup = 16;
constexpr std::size_t kPanelFloats = std::size_t{kTileRows} * kPanelValues / kSmallestGroup;

// The scratch of a tile. Codes: for every 4 values, 4 bytes of each row; scales and minima: for
// every group, those of each row; sums: of every token, those of each row.
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

// Unpacks 8 rows, lanes [lane, lane + 8) of the panel, and moves their pointers on. The rows that
// come next are `ahead` bytes behind them.
template <class Type>
void unpack_rows(const std::byte** units, int n_values, std::size_t ahead, const Panel& panel,
                 int lane) {
    constexpr int n_groups = Type::kUnit / Type::kGroup;
    std::byte* codes = panel.codes + 4 * lane;
    int group = lane;
    const std::byte* rows[kRows];
    std::copy(units, units + kRows, rows);
    std::size_t asked = 0;  // of a row: once for every line of memory
    for (int i = 0; i < n_values; i += Type::kUnit) {
        if (asked % kLine < Type::kUnitBytes)
            for (const std::byte* row : rows) ask_for_bytes(row + ahead, Type::kUnitBytes);
        asked += Type::kUnitBytes;
        RowFloats s[n_groups], m[n_groups];
        Type::scales(rows, s, m);
        for (int g = 0; g < n_groups; ++g, group += kTileRows) {
            store_floats(panel.scales + group, s[g]);
            if constexpr (Type::kHasMinimum) store_floats(panel.minima + group, m[g]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < Type::kUnit / Type::kSpan; ++j, codes += Type::kSpan * kTileRows)
            Type::unpack(rows, j, [&](int four, RowBytes block) {
                store32(codes + 4 * kTileRows * four, block);
            });
        for (const std::byte*& row : rows) row += Type::kUnitBytes;
    }
    std::copy(rows, rows + kRows, units);
}

// Adds a panel's part of the products of kTokens tokens to their sums.
template <class F, int kTokens>
void add_panel(const Panel& panel, int n_groups, const TokenPart& token, std::size_t stride,
               float* sums) {
    const std::size_t float_stride = stride / sizeof(float);
    Floats acc[kTokens][Tile::kVectors];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v)
            acc[t][v] = load_floats(sums + t * kTileRows + v * Tile::kLanes);
    for (int g = 0; g < n_groups; ++g) {
        TileInts<kTokens> products;
        group_products<F, kTokens>(panel.codes + std::size_t{kTileRows} * F::kGroup * g,
                                   {token.codes + F::kGroup * g, stride}, products);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
            const std::size_t at = static_cast<std::size_t>(t) * float_stride + g;
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
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < Tile::kVectors; ++v)
            store_floats(sums + t * kTileRows + v * Tile::kLanes, acc[t][v]);
}

// Of tokens [first, n_tokens), kTokens at a time, then the rest in smaller steps.
template <class Type, int kTokens>
void add_tokens(const Panel& panel, int n_values, int column, int row_values,
                const RoundedTokens& tokens, int first) {
    for (; first + kTokens <= tokens.n_tokens; first += kTokens) {
        const std::byte* token = tokens.data + static_cast<std::size_t>(first) * tokens.stride;
        add_panel<FormOf<Type>, kTokens>(panel, n_values / Type::kGroup,
                                         part_of<Type>(token, row_values, column), tokens.stride,
                                         panel.sums + static_cast<std::size_t>(first) * kTileRows);
    }
    if constexpr (kTokens > 1)
        add_tokens<Type, kTokens / 2>(panel, n_values, column, row_values, tokens, first);
}

template <class Type>
void many_tokens(const WeightRows& w, const RoundedTokens& tokens, std::byte* scratch, float* out,
                 std::size_t out_stride) {
    const Panel panel = panel_in(scratch);
    const std::byte* units[kTileRows];
    for (int r = 0; r < kTileRows; ++r)
        units[r] = w.data + static_cast<std::size_t>(std::min(r, w.n_rows - 1)) * w.stride;
    std::fill_n(panel.sums, static_cast<std::size_t>(tokens.n_tokens) * kTileRows, 0.0f);
    for (int column = 0; column < w.n_values; column += kPanelValues) {
        const int n_values = std::min(kPanelValues, w.n_values - column);
        for (int lane = 0; lane < kTileRows; lane += kRows)
            unpack_rows<Type>(units + lane, n_values, kRows * w.stride, panel, lane);
        add_tokens<Type, Tile::kTokens>(panel, n_values, column, w.n_values, tokens, 0);
    }
    for (int t = 0; t < tokens.n_tokens; ++t)
        std::copy_n(panel.sums + static_cast<std::size_t>(t) * kTileRows, w.n_rows,
                    out + static_cast<std::size_t>(t) * out_stride);
}

}  // namespace
}  // namespace entropykv
