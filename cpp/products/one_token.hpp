// Products of rows of weights with one token: 8 rows at a time, so that the sums of a group of all
// of them are one register. It goes at the speed of memory, or nearly.
#pragma once

#include "products/product_kernels.hpp"
#include "products/rounded_tokens.hpp"

namespace entropykv {
namespace {

// acc += scales * token's scale * (sums - offset), or ... * sums + minima * offset.
template <class Type>
inline __m256 add_group(__m256 acc, __m256i sums, __m256 scale, __m256 minimum, float token_scale,
                        float offset) {
    const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(token_scale));
    const __m256 whole = _mm256_cvtepi32_ps(sums);
    if constexpr (Type::kHasMinimum)
        return _mm256_fmadd_ps(minimum, _mm256_set1_ps(offset),
                               _mm256_fmadd_ps(whole, factor, acc));
    if constexpr (Type::kZero == 0) return _mm256_fmadd_ps(whole, factor, acc);
    return _mm256_fmadd_ps(_mm256_sub_ps(whole, _mm256_set1_ps(offset)), factor, acc);
}

template <class Type>
inline HalfSums sums_of(const RowPointers& units, int j, const std::byte* codes) {
    __m256i p[kRows];
    const __m256i activations = load32(codes + 32 * j);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
        p[r] = partial_sums<Type::kBits>(Type::codes(units[r], j), activations);
    return reduce<Type::kBits>(p);
}

// Of a group of 256, whose products are added up before they are reduced.
template <class Type>
inline HalfSums sums_of_unit(const RowPointers& units, const std::byte* codes) {
    __m256i p[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        p[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j)
            p[r] = add_partial<Type::kBits>(
                p[r], partial_sums<Type::kBits>(Type::codes(units[r], j), load32(codes + 32 * j)));
    }
    return reduce<Type::kBits>(p);
}

template <class Type>
inline __m256 add_unit(__m256 acc, const RowPointers& units, const TokenPart& token) {
    constexpr int n_groups = Type::kUnit / Type::kGroup;
    __m256 s[n_groups], m[n_groups];
    Type::scales(units, s, m);
    if constexpr (Type::kGroup == 256) {
        const HalfSums sums = sums_of_unit<Type>(units, token.codes);
        return add_group<Type>(acc, _mm256_add_epi32(sums.lower, sums.upper), s[0], m[0],
                               token.scales[0], token.offsets[0]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < Type::kUnit / 32; ++j) {
        const HalfSums sums = sums_of<Type>(units, j, token.codes);
        if constexpr (Type::kGroup == 16) {
            acc = add_group<Type>(acc, sums.lower, s[2 * j], m[0], token.scales[2 * j],
                                  token.offsets[2 * j]);
            acc = add_group<Type>(acc, sums.upper, s[2 * j + 1], m[0], token.scales[2 * j + 1],
                                  token.offsets[2 * j + 1]);
        } else {
            acc = add_group<Type>(acc, _mm256_add_epi32(sums.lower, sums.upper), s[j], m[j],
                                  token.scales[j], token.offsets[j]);
        }
    }
    return acc;
}

template <class Type>
void one_token(const WeightRows& w, const std::byte* token, float* out) {
    for (int first = 0; first < w.n_rows; first += kRows) {
        const std::byte* units[kRows];
        for (int r = 0; r < kRows; ++r) {
            const int row = first + r < w.n_rows ? first + r : w.n_rows - 1;
            units[r] = w.data + static_cast<std::size_t>(row) * w.stride;
        }
        __m256 acc = _mm256_setzero_ps();
        for (int i = 0; i < w.n_values; i += Type::kUnit) {
            acc = add_unit<Type>(acc, units, part_of<Type>(token, w.n_values, i));
            for (const std::byte*& unit : units) unit += Type::kUnitBytes;
        }
        alignas(32) float sums[kRows];
        _mm256_store_ps(sums, acc);
        const int n = w.n_rows - first < kRows ? w.n_rows - first : kRows;
        for (int r = 0; r < n; ++r) out[first + r] = sums[r];
    }
}

}  // namespace
}  // namespace entropykv
