// Computes products of rows of weights with one token. It takes 8 rows at a time, so that one
// register holds the sums of a group for all of them. Its speed is nearly that of memory.
#pragma once

#include <algorithm>

#include "products/block_types.hpp"
#include "products/prefetch_weights.hpp"
#include "products/product_kernels.hpp"
#include "products/rounded_tokens.hpp"

namespace entropykv {
namespace {

// Computes acc += scales * token's scale * (sums - offset), or acc += scales * token's scale * sums
// + minima * offset.
template <class Type>
inline RowFloats add_group(RowFloats acc, RowInts sums, RowFloats scale, RowFloats minimum,
                           float token_scale, float offset) {
    const RowFloats factor = multiply(scale, same_floats(token_scale));
    const RowFloats whole = to_floats(sums);
    if constexpr (Type::kHasMinimum)
        return multiply_add(minimum, same_floats(offset), multiply_add(whole, factor, acc));
    if constexpr (Type::kZero == 0) return multiply_add(whole, factor, acc);
    return multiply_add(subtract(whole, same_floats(offset)), factor, acc);
}

// Computes products of every row's codes 32 j to 32 (j + n) - 1 of a unit.
template <class Type>
inline void multiply_rows(const RowPointers& units, const std::byte* codes, int j, int n,
                          Partial (&p)[kRows]) {
    constexpr bool kSplit = Type::kGroup == 16;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        p[r] = no_products();
#pragma GCC unroll 8
        for (int i = j; i < j + n; ++i)
            p[r] = add_products<Type::kBits, kSplit>(
                p[r], Type::codes(RowCodes(units[r] + Type::kCodesAt), i), load32(codes + 32 * i));
    }
}

#if defined(__AVX512VNNI__)
// The codes of a unit are one register: each two bits of all its bytes are 32 values of either
// half.
template <>
inline void multiply_rows<TQ2_0>(const RowPointers& units, const std::byte* codes, int, int,
                                 Partial (&p)[kRows]) {
    constexpr int kFields = 4;
    __m512i activations[kFields];
#pragma GCC unroll 4
    for (int f = 0; f < kFields; ++f)
        activations[f] = _mm512_inserti64x4(_mm512_castsi256_si512(load32(codes + 32 * f)),
                                            load32(codes + TQ2_0::kUnit / 2 + 32 * f), 1);
    const __m512i mask = _mm512_set1_epi8(3);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        const __m512i packed = _mm512_loadu_si512(units[r]);
        __m512i sums = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int f = 0; f < kFields; ++f)
            sums = _mm512_dpbusd_epi32(
                sums, _mm512_and_si512(_mm512_srli_epi16(packed, 2 * f), mask), activations[f]);
        p[r] = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    }
}
#endif

template <class Type>
inline RowFloats add_unit(RowFloats acc, const RowPointers& units, const TokenPart& token) {
    constexpr int n_groups = Type::kUnit / Type::kGroup;
    RowFloats s[n_groups], m[n_groups];
    Type::template scales<EightRows>(units, s, m);
    Partial p[kRows];
    if constexpr (Type::kGroup == 256) {
        multiply_rows<Type>(units, token.codes, 0, 8, p);
        return add_group<Type>(acc, reduce<Type::kBits>(p), s[0], m[0], token.scales[0],
                               token.offsets[0]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < Type::kUnit / 32; ++j) {
        multiply_rows<Type>(units, token.codes, j, 1, p);
        if constexpr (Type::kGroup == 16) {
            RowInts lower, upper;
            reduce_halves<Type::kBits>(p, lower, upper);
            acc = add_group<Type>(acc, lower, s[2 * j], m[0], token.scales[2 * j],
                                  token.offsets[2 * j]);
            acc = add_group<Type>(acc, upper, s[2 * j + 1], m[0], token.scales[2 * j + 1],
                                  token.offsets[2 * j + 1]);
        } else {
            acc = add_group<Type>(acc, reduce<Type::kBits>(p), s[j], m[j], token.scales[j],
                                  token.offsets[j]);
        }
    }
    return acc;
}

template <class Type, bool kNear>
void multiply_one(const WeightRows& w, const std::byte* token, float* out) {
    const std::size_t ahead_by = std::max(kAhead, kRows * w.stride);
    for (int first = 0; first < w.n_rows; first += kRows) {
        const std::byte* units[kRows];
        for (int r = 0; r < kRows; ++r) {
            const int row = first + r < w.n_rows ? first + r : w.n_rows - 1;
            units[r] = w.data + static_cast<std::size_t>(row) * w.stride;
        }
        WeightsAhead<kNear> ahead(units[0] + ahead_by);
        RowFloats acc = same_floats(0.0f);
        for (int i = 0; i < w.n_values; i += Type::kUnit) {
            ahead.template advance<kRows * Type::kUnitBytes>();
            acc = add_unit<Type>(acc, RowPointers(units), part_of<Type>(token, w.n_values, i));
            for (const std::byte*& unit : units) unit += Type::kUnitBytes;
        }
        float sums[kRows];
        store_floats(sums, acc);
        const int n = w.n_rows - first < kRows ? w.n_rows - first : kRows;
        for (int r = 0; r < n; ++r) out[first + r] = sums[r];
    }
}

template <class Type>
void one_token(const WeightRows& w, const std::byte* token, float* out) {
    if (kRows * w.stride <= kMostNear)
        multiply_one<Type, true>(w, token, out);
    else
        multiply_one<Type, false>(w, token, out);
}

}  // namespace
}  // namespace entropykv
