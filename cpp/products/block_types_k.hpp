// Describes ggml's K types: units of 256 weights, whose groups have scales of their own in steps of
// the unit's scale. See block_types.hpp.
#pragma once

#include "products/code_bytes.hpp"

namespace entropykv {
namespace {

// Loads the scales and minima of the 8 groups of Q4_K and Q5_K, which take 6 bits each in 12 bytes.
template <class Lanes, class Rows, class Floats = typename Lanes::Floats>
inline void six_bit_scales(const Rows& units, Floats* s, Floats* m) {
    typename Lanes::Bytes c[4];
    Lanes::columns(units, 0, c);
    const Floats step = low_halves(c[0]), minus = subtract(Floats{}, high_halves(c[0]));
    const auto upper_scales = with_upper(field(c[3], 0, 15), field(c[1], 6, 3), 4);
    const auto upper_minima = with_upper(field(c[3], 4, 15), field(c[2], 6, 3), 4);
    const auto lower_scales = field(c[1], 0, 63), lower_minima = field(c[2], 0, 63);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
        s[g] = multiply(unsigned_bytes(lower_scales, g), step);
        m[g] = multiply(unsigned_bytes(lower_minima, g), minus);
        s[g + 4] = multiply(unsigned_bytes(upper_scales, g), step);
        m[g + 4] = multiply(unsigned_bytes(upper_minima, g), minus);
    }
}

// Returns codes 32 j to 32 j + 31, of 4 bits each. From `offset` on, every 32 bytes hold 64 codes:
// the first 32 in their lower halves, the next 32 in their upper halves.
template <class Bytes>
inline auto nibbles_of_two(const Bytes& bytes, int offset, int j) {
    return field(bytes.at(offset + 32 * (j / 2)), 4 * (j % 2), 15);
}

struct Q4_K {
    static constexpr int kUnit = 256, kUnitBytes = 144, kGroup = 32, kBits = 4, kZero = 0;
    static constexpr int kCodesAt = 16, kCodeBytes = 128;
    static constexpr bool kHasMinimum = true;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int j) {
        return nibbles_of_two(bytes, 0, j);
    }
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats* m) {
        six_bit_scales<Lanes>(units, s, m);
    }
};

struct Q5_K {
    static constexpr int kUnit = 256, kUnitBytes = 176, kGroup = 32, kBits = 5, kZero = 0;
    static constexpr int kCodesAt = 16, kCodeBytes = 160;
    static constexpr bool kHasMinimum = true;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int j) {
        return with_upper(nibbles_of_two(bytes, 32, j), field(bytes.at(0), j, 1), 4);
    }
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats* m) {
        six_bit_scales<Lanes>(units, s, m);
    }
};

struct Q6_K {
    static constexpr int kUnit = 256, kUnitBytes = 210, kGroup = 16, kBits = 6, kZero = 32;
    static constexpr int kCodesAt = 0, kCodeBytes = 192;
    static constexpr bool kHasMinimum = false;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int j) {
        const int half = j / 4, quarter = j % 4;
        const auto packed = bytes.at(64 * half + 32 * (quarter % 2));
        const auto high = field(bytes.at(128 + 32 * half), 2 * quarter, 3);
        return with_upper(field(packed, quarter < 2 ? 0 : 4, 15), high, 4);
    }
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats*) {
        const auto step = Lanes::halves(units, 208);
        typename Lanes::Bytes scale[4];
        Lanes::columns(units, 192, scale);
#pragma GCC unroll 16
        for (int g = 0; g < 16; ++g) s[g] = multiply(signed_bytes(scale[g / 4], g % 4), step);
    }
};

}  // namespace
}  // namespace entropykv
