// ggml's K types: units of 256 weights whose groups have scales of their own, in steps of the
// unit's. See block_types.hpp.
#pragma once

#include "products/eight_rows.hpp"

namespace entropykv {
namespace {

// Scales and minima of the 8 groups of Q4_K and Q5_K, 6 bits each in 12 bytes.
inline void six_bit_scales(const RowPointers& units, RowFloats* s, RowFloats* m) {
    RowFloats scale[kRows], minimum[kRows];
    for (int r = 0; r < kRows; ++r) {
        const auto a = load_as<std::uint32_t>(units[r] + 4);
        const auto b = load_as<std::uint32_t>(units[r] + 8);
        const auto c = load_as<std::uint32_t>(units[r] + 12);
        const std::uint64_t upper_scales = (c & 0x0f0f0f0fu) | ((a >> 6 & 0x03030303u) << 4);
        const std::uint64_t upper_minima = (c >> 4 & 0x0f0f0f0fu) | ((b >> 6 & 0x03030303u) << 4);
        scale[r] = unsigned_bytes(upper_scales << 32 | (a & 0x3f3f3f3fu));
        minimum[r] = unsigned_bytes(upper_minima << 32 | (b & 0x3f3f3f3fu));
    }
    transpose(scale);
    transpose(minimum);
    RowFloats step, least;
    load_two_halves(units, 0, step, least);
    const RowFloats minus = subtract(same_floats(0.0f), least);
    for (int g = 0; g < kRows; ++g) {
        s[g] = multiply(scale[g], step);
        m[g] = multiply(minimum[g], minus);
    }
}

// 32 bytes hold 32 codes in their lower and the next 32 in their upper halves.
inline RowBytes nibbles_of_two(const std::byte* p, int j) {
    return field(load32(p + 32 * (j / 2)), 4 * (j % 2), 15);
}

struct Q4_K {
    static constexpr int kUnit = 256, kUnitBytes = 144, kGroup = 32, kBits = 4, kZero = 0;
    static constexpr int kSpan = 64;
    static constexpr bool kHasMinimum = true;
    static RowBytes codes(const std::byte* unit, int j) { return nibbles_of_two(unit + 16, j); }
    template <class Put>
    static void unpack(const RowPointers& units, int j, Put put) {
        for (int piece = 0; piece < 2; ++piece) {
            RowBytes packed[4];
            load_columns(units, static_cast<std::size_t>(16 + 32 * j + 16 * piece), packed);
            for (int i = 0; i < 4; ++i) {
                put(4 * piece + i, field(packed[i], 0, 15));
                put(8 + 4 * piece + i, field(packed[i], 4, 15));
            }
        }
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats* m) {
        six_bit_scales(units, s, m);
    }
};

struct Q5_K {
    static constexpr int kUnit = 256, kUnitBytes = 176, kGroup = 32, kBits = 5, kZero = 0;
    static constexpr int kSpan = 64;
    static constexpr bool kHasMinimum = true;
    static RowBytes codes(const std::byte* unit, int j) {
        return with_upper(nibbles_of_two(unit + 48, j), field(load32(unit + 16), j, 1), 4);
    }
    template <class Put>
    static void unpack(const RowPointers& units, int j, Put put) {
        for (int piece = 0; piece < 2; ++piece) {
            RowBytes packed[4], high[4];
            load_columns(units, static_cast<std::size_t>(48 + 32 * j + 16 * piece), packed);
            load_columns(units, static_cast<std::size_t>(16 + 16 * piece), high);
            for (int i = 0; i < 4; ++i)
                for (int f = 0; f < 2; ++f)
                    put(8 * f + 4 * piece + i,
                        with_upper(field(packed[i], 4 * f, 15), field(high[i], 2 * j + f, 1), 4));
        }
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats* m) {
        six_bit_scales(units, s, m);
    }
};

struct Q6_K {
    static constexpr int kUnit = 256, kUnitBytes = 210, kGroup = 16, kBits = 6, kZero = 32;
    static constexpr int kSpan = 128;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int j) {
        const int half = j / 4, quarter = j % 4;
        const RowBytes packed = load32(unit + 64 * half + 32 * (quarter % 2));
        const RowBytes high = field(load32(unit + 128 + 32 * half), 2 * quarter, 3);
        return with_upper(field(packed, quarter < 2 ? 0 : 4, 15), high, 4);
    }
    template <class Put>
    static void unpack(const RowPointers& units, int j, Put put) {
        for (int piece = 0; piece < 2; ++piece) {
            RowBytes packed[2][4], high[4];
            for (int k = 0; k < 2; ++k)
                load_columns(units, static_cast<std::size_t>(64 * j + 32 * k + 16 * piece),
                             packed[k]);
            load_columns(units, static_cast<std::size_t>(128 + 32 * j + 16 * piece), high);
            for (int i = 0; i < 4; ++i)
                for (int f = 0; f < 4; ++f)
                    put(8 * f + 4 * piece + i,
                        with_upper(field(packed[f % 2][i], f < 2 ? 0 : 4, 15),
                                   field(high[i], 2 * f, 3), 4));
        }
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats*) {
        const RowFloats step = load_halves(units, 208);
        for (int first = 0; first < 16; first += kRows) {
            RowFloats scale[kRows];
            for (int r = 0; r < kRows; ++r)
                scale[r] = signed_bytes(load_as<std::uint64_t>(units[r] + 192 + first));
            transpose(scale);
            for (int g = 0; g < kRows; ++g) s[first + g] = multiply(scale[g], step);
        }
    }
};

}  // namespace
}  // namespace entropykv
