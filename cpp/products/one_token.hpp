// Computes products of rows of weights with one token. It takes 8 rows at a time, so that one
// register holds the sums of a group for all of them.
// A token is stored as activations rounded to 8 bits: n_values codes, then for every group of
// weights its scale and the term that corrects for the zero of the weights: scale * (sum of codes)
// if a group has a minimum, otherwise kZero * (sum of codes). Floats hold these sums of integers
// exactly.
#pragma once

#include <algorithm>

#include "products/block_types.hpp"
#include "products/eight_rows.hpp"
#include "products/prefetch_weights.hpp"
#include "products/product_kernels.hpp"

namespace entropykv {
namespace {

template <class Type>
std::size_t token_bytes(int n_values) {
    const auto n = static_cast<std::size_t>(n_values);
    const std::size_t bytes = n + 2 * sizeof(float) * (n / Type::kGroup);
    return (bytes + 63) / 64 * 64;
}

// Refers to a rounded token from one of its groups on.
struct TokenPart {
    const std::byte* codes;
    const float* scales;
    const float* offsets;
};

template <class Type>
inline TokenPart part_of(const std::byte* token, int n_values, int first) {
    const auto* scales = reinterpret_cast<const float*>(token + n_values);
    const int group = first / Type::kGroup;
    return {token + first, scales + group, scales + n_values / Type::kGroup + group};
}

template <class Type>
void quantise(const float* token, int n_values, std::byte* rounded) {
    auto* scales = reinterpret_cast<float*>(rounded + n_values);
    float* offsets = scales + n_values / Type::kGroup;
    for (int i = 0; i < n_values; i += Type::kUnit) {
        const float scale = largest_magnitude(token + i, Type::kUnit) / 127.0f;
        const float inverse = scale > 0x1p-120f ? 1.0f / scale : 0.0f;
        for (int j = i; j < i + Type::kUnit; j += Type::kGroup) {
            int sum = 0;
            for (int k = j; k < j + Type::kGroup; k += 16)
                sum += round_16(token + k, inverse, rounded + k);
            *scales++ = scale;
            *offsets++ = static_cast<float>(sum) *
                         (Type::kHasMinimum ? scale : static_cast<float>(Type::kZero));
        }
    }
}

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
// The codes of a unit fill one register: the same two bits of all its bytes are 32 values of the
// unit's first half, and 32 of its second half.
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

#if defined(__AVX512VNNI__)
// Adds up the four sums in each lane of 128 bits, for 4 rows: a lane of the result has one sum of
// each row. Sums must fit into 16 bits.
inline __m512i sums_of_lanes(const __m512i* p) {
    const __m512i ones = _mm512_set1_epi16(1);
    const __m512 a = _mm512_castsi512_ps(_mm512_madd_epi16(_mm512_packs_epi32(p[0], p[1]), ones));
    const __m512 b = _mm512_castsi512_ps(_mm512_madd_epi16(_mm512_packs_epi32(p[2], p[3]), ones));
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
}

// Returns two numbers, each in 8 lanes.
inline __m512 same_of_two(const float* x) {
    return _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(x[0]), _mm512_set1_ps(x[1]));
}

// A register has 64 codes of a row, which are 4 groups. A code has 6 bits: 4 of one byte, and 2 of
// another.
template <>
inline RowFloats add_unit<Q6_K>(RowFloats acc, const RowPointers& units, const TokenPart& token) {
    RowBytes scale_bytes[4];
    EightRows::columns(units, 192, scale_bytes);
    const __m256 step = EightRows::halves(units, 208);
    const __m512 steps = _mm512_insertf32x8(_mm512_castps256_ps512(step), step, 1);
    const __m512i low_four = _mm512_set1_epi8(15), six = _mm512_set1_epi8(63);
    const auto halves = [](short lower, short upper) {
        return _mm512_mask_blend_epi16(0xffff0000, _mm512_set1_epi16(lower),
                                       _mm512_set1_epi16(upper));
    };
    const __m512i left = halves(4, 2), right = halves(0, 2);
    const __m512i rows_of_first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i rows_of_second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    // Adds the products of groups g and g + 1, whose sums are in the lanes of two registers.
    const auto add_two = [&](__m512i sums, int g) {
        const __m512i bytes = _mm512_broadcast_i64x4(scale_bytes[g / 4]);
        const __m512i to_top = _mm512_mask_blend_epi32(0xff00, _mm512_set1_epi32(24 - 8 * (g % 4)),
                                                       _mm512_set1_epi32(16 - 8 * (g % 4)));
        const __m512i scales = _mm512_srai_epi32(_mm512_sllv_epi32(bytes, to_top), 24);
        const __m512 factors = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(scales), steps),
                                             same_of_two(token.scales + g));
        const __m512 wholes =
            _mm512_sub_ps(_mm512_cvtepi32_ps(sums), same_of_two(token.offsets + g));
        acc = multiply_add(_mm512_castps512_ps256(wholes), _mm512_castps512_ps256(factors), acc);
        acc = multiply_add(_mm512_extractf32x8_ps(wholes, 1), _mm512_extractf32x8_ps(factors, 1),
                           acc);
    };
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const __m512i activations[2] = {_mm512_loadu_si512(token.codes + 128 * half),
                                        _mm512_loadu_si512(token.codes + 128 * half + 64)};
        __m512i p[2][kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const __m512i low = _mm512_loadu_si512(units[r] + 64 * half);
            const __m512i high = _mm512_broadcast_i64x4(load32(units[r] + 128 + 32 * half));
            constexpr int kSelect = 0xca;  // the second operand where the first has ones
            const __m512i first =
                _mm512_ternarylogic_epi64(low_four, low, _mm512_sllv_epi16(high, left), kSelect);
            const __m512i second = _mm512_ternarylogic_epi64(
                low_four, _mm512_srli_epi16(low, 4), _mm512_srlv_epi16(high, right), kSelect);
            const __m512i none = _mm512_setzero_si512();
            p[0][r] = _mm512_dpbusd_epi32(none, _mm512_and_si512(first, six), activations[0]);
            p[1][r] = _mm512_dpbusd_epi32(none, _mm512_and_si512(second, six), activations[1]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const __m512i lower = sums_of_lanes(p[i]), upper = sums_of_lanes(p[i] + 4);
            const int g = 8 * half + 4 * i;
            add_two(_mm512_permutex2var_epi64(lower, rows_of_first, upper), g);
            add_two(_mm512_permutex2var_epi64(lower, rows_of_second, upper), g + 2);
        }
    }
    return acc;
}
#endif

template <class Type, bool kNear>
void multiply_one(const WeightRows& w, const std::byte* token, float* out) {
    const std::size_t ahead_by = std::max(kNear ? kAhead : kFarAhead, kRows * w.stride);
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

// Says whether weights are prefetched into the L1 cache. Units of the K types have more lines than
// that cache takes requests at a time, and weights of 8 bits are read faster than it takes
// requests.
template <class Type>
constexpr bool kGoesNear = kRows * Type::kUnitBytes <= 1024 && Type::kBits < 8;

template <class Type>
void one_token(const WeightRows& w, const std::byte* token, float* out) {
    if (kGoesNear<Type> && kRows * w.stride <= kMostNear)
        multiply_one<Type, true>(w, token, out);
    else
        multiply_one<Type, false>(w, token, out);
}

}  // namespace
}  // namespace entropykv
