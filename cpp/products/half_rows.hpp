// Computes products of f16 weights with activations that are not rounded: weights are converted to
// f32 in registers. The sum of a row and a token is always computed in the same way, whatever tile
// they are in.
#pragma once

#include <algorithm>
#include <cstring>

#include "products/prefetch_weights.hpp"
#include "products/product_kernels.hpp"
#include "products/sixteen_lanes.hpp"

namespace entropykv {
namespace {

constexpr int kLanesOfSum = 16;
constexpr int kHalfBytes = 2;

// A token is stored as floats, padded with zeros to the last lane.
inline std::size_t float_token_bytes(int n_values) {
    const auto n = static_cast<std::size_t>(n_values);
    return sizeof(float) * ((n + kLanesOfSum - 1) / kLanesOfSum * kLanesOfSum);
}

inline void copy_token(const float* token, int n_values, std::byte* copy) {
    const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(n_values);
    std::memcpy(copy, token, bytes);
    std::memset(copy + bytes, 0, float_token_bytes(n_values) - bytes);
}

template <int kRowsOfTile, int kTokens>
inline void add_lanes(const std::byte* const (&rows)[kRowsOfTile], std::size_t row_offset,
                      const std::byte* tokens, std::size_t token_stride,
                      Lanes (&sums)[kTokens][kRowsOfTile]) {
    Lanes w[kRowsOfTile];
#pragma GCC unroll 8
    for (int r = 0; r < kRowsOfTile; ++r) w[r] = halves_at(rows[r] + row_offset);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
        const Lanes x = floats_at(tokens + static_cast<std::size_t>(t) * token_stride);
#pragma GCC unroll 8
        for (int r = 0; r < kRowsOfTile; ++r) sums[t][r] = add_product(sums[t][r], w[r], x);
    }
}

// Computes products of the rows from `first` on with some tokens; rows from n_rows on do not exist,
// and are left out.
template <int kRowsOfTile, int kTokens>
void half_tile(const WeightRows& w, int first, const std::byte* tokens, std::size_t token_stride,
               float* out, std::size_t out_stride) {
    const std::byte* rows[kRowsOfTile];
    for (int r = 0; r < kRowsOfTile; ++r)
        rows[r] = w.data + static_cast<std::size_t>(std::min(first + r, w.n_rows - 1)) * w.stride;
    Lanes sums[kTokens][kRowsOfTile];
    for (auto& of_token : sums)
        for (Lanes& sum : of_token) sum = no_lanes();
    const int n_whole = w.n_values / kLanesOfSum * kLanesOfSum;
    WeightsAhead<false> ahead(rows[0] + kRowsOfTile * w.stride);
    std::size_t offset = 0;
    for (int i = 0; i < n_whole; i += kLanesOfSum, offset += kLanesOfSum * kHalfBytes) {
        if (kTokens == 1) ahead.template advance<kRowsOfTile * kLanesOfSum * kHalfBytes>();
        add_lanes(rows, offset, tokens + sizeof(float) * static_cast<std::size_t>(i), token_stride,
                  sums);
    }
    if (n_whole < w.n_values) {  // multiplies the rest of a row, padded with zeros
        std::byte rest[kRowsOfTile][kLanesOfSum * kHalfBytes]{};
        for (int r = 0; r < kRowsOfTile; ++r) {
            std::memcpy(rest[r], rows[r] + offset,
                        static_cast<std::size_t>((w.n_values - n_whole) * kHalfBytes));
            rows[r] = rest[r];
        }
        add_lanes(rows, 0, tokens + sizeof(float) * static_cast<std::size_t>(n_whole), token_stride,
                  sums);
    }
    for (int t = 0; t < kTokens; ++t) {
        float found[kRowsOfTile];
        for (int r = 0; r < kRowsOfTile; r += kFloatRows) {
            Lanes some[kFloatRows];
            std::copy_n(sums[t] + r, kFloatRows, some);
            sum_up(some, found + r);
        }
        std::copy_n(found, std::min(kRowsOfTile, w.n_rows - first),
                    out + static_cast<std::size_t>(t) * out_stride + first);
    }
}

inline void one_half_token(const WeightRows& w, const std::byte* token, float* out) {
    constexpr int kRowsOfTile = 2 * kFloatRows;
    for (int first = 0; first < w.n_rows; first += kRowsOfTile)
        half_tile<kRowsOfTile, 1>(w, first, token, 0, out, 0);
}

// Takes tokens [first, n_tokens) kTokens at a time, and the rest in smaller steps; 8 tokens are
// taken as twice 4, and not as 6 and 2.
template <int kTokens>
void add_half_tokens(const WeightRows& w, const RoundedTokens& tokens, int first, float* out,
                     std::size_t out_stride) {
    for (; tokens.n_tokens - first >= kTokens; first += kTokens) {
        if (kTokens == 6 && tokens.n_tokens - first == 8) break;
        for (int row = 0; row < w.n_rows; row += kFloatRows)
            half_tile<kFloatRows, kTokens>(
                w, row, tokens.data + static_cast<std::size_t>(first) * tokens.stride,
                tokens.stride, out + static_cast<std::size_t>(first) * out_stride, out_stride);
    }
    constexpr int kFewer = kTokens == 6 ? 4 : kTokens / 2;
    if constexpr (kFewer > 0) add_half_tokens<kFewer>(w, tokens, first, out, out_stride);
}

inline void many_half_tokens(const WeightRows& w, const RoundedTokens& tokens, std::byte*,
                             float* out, std::size_t out_stride) {
    add_half_tokens<kFloatTokens>(w, tokens, 0, out, out_stride);
}

}  // namespace
}  // namespace entropykv
