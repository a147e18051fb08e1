// Describes ggml's blocks of 32 weights, and its ternary types and K types of 256, as groups of
// codes with a scale: weight = scale * (code - kZero), or scale * code + minimum if kHasMinimum.
// Every type defines the same names: kUnit values take kUnitBytes; scales(units, s, m) loads the
// scales and minima of a unit's groups of kGroup values, with one row per lane. Codes take
// kCodeBytes from byte kCodesAt on. codes(bytes, j) returns values 32 j to 32 j + 31 from whatever
// code_bytes.hpp provides as `bytes`: all codes of one row, or four codes of every row of a tile.
#pragma once

#include "products/code_bytes.hpp"

namespace entropykv {
namespace {

// Types inherit how their scales are loaded. This loads the one scale of a block that is one group:
// an f16 number at byte `at`.
template <int at>
struct OneScale {
    static constexpr bool kHasMinimum = false;
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats*) {
        s[0] = Lanes::halves(units, at);
    }
};

// Loads the scale and the minimum of a block that is one group: two f16 numbers at its beginning.
struct ScaleAndMinimum {
    static constexpr bool kHasMinimum = true;
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats* m) {
        Lanes::two_halves(units, 0, s[0], m[0]);
    }
};

struct Q4_0 : OneScale<0> {
    static constexpr int kUnit = 32, kUnitBytes = 18, kGroup = 32, kBits = 4, kZero = 8;
    static constexpr int kCodesAt = 2, kCodeBytes = 16;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int) {
        return bytes.nibbles(0);
    }
};

struct Q4_1 : ScaleAndMinimum {
    static constexpr int kUnit = 32, kUnitBytes = 20, kGroup = 32, kBits = 4, kZero = 0;
    static constexpr int kCodesAt = 4, kCodeBytes = 16;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int) {
        return bytes.nibbles(0);
    }
};

// Returns the 5-bit codes of a block: bit i of its first four bytes is the upper bit of code i.
template <class Bytes>
inline auto five_bits(const Bytes& bytes) {
    return with_upper(bytes.nibbles(4), bytes.bits(0), 4);
}

struct Q5_0 : OneScale<0> {
    static constexpr int kUnit = 32, kUnitBytes = 22, kGroup = 32, kBits = 5, kZero = 16;
    static constexpr int kCodesAt = 2, kCodeBytes = 20;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int) {
        return five_bits(bytes);
    }
};

struct Q5_1 : ScaleAndMinimum {
    static constexpr int kUnit = 32, kUnitBytes = 24, kGroup = 32, kBits = 5, kZero = 0;
    static constexpr int kCodesAt = 4, kCodeBytes = 20;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int) {
        return five_bits(bytes);
    }
};

struct Q8_0 : OneScale<0> {
    static constexpr int kUnit = 32, kUnitBytes = 34, kGroup = 32, kBits = 8;
    static constexpr int kZero = kSignedCodes ? 0 : 128;
    static constexpr int kCodesAt = 2, kCodeBytes = 32;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int) {
        const auto weights = bytes.at(0);
        return kSignedCodes ? weights : flip_signs(weights);
    }
};

struct TQ2_0 : OneScale<64> {
    static constexpr int kUnit = 256, kUnitBytes = 66, kGroup = 256, kBits = 2, kZero = 1;
    static constexpr int kCodesAt = 0, kCodeBytes = 64;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int j) {
        return field(bytes.at(32 * (j / 4)), 2 * (j % 4), 3);
    }
};

// A byte holds five ternary digits as a fraction of 256: multiplied by 3, its integer part is the
// first digit, and its fraction holds the following ones. Digit i of the first 32 bytes are 32
// values, digit i of the next 16 bytes 16 values; the last 4 bytes have four digits of 4 values
// each.
struct TQ1_0 : OneScale<52> {
    static constexpr int kUnit = 256, kUnitBytes = 54, kGroup = 256, kBits = 2, kZero = 1;
    static constexpr int kCodesAt = 0, kCodeBytes = 52;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int j) {
        if (j < 5) return digit(skip(bytes.at(0), j));
        const auto tail = bytes.half(32);
        if (j < 7) return digit(bytes.join(skip(tail, 2 * j - 10), skip(tail, 2 * j - 9)));
        const auto last = bytes.fours(48, [](auto four, int digits) { return skip(four, digits); });
        return digit(bytes.join(skip(tail, 4), last));
    }

private:
    template <typename Packed>
    static Packed skip(Packed bytes, int digits) {
        for (int i = 0; i < digits; ++i) bytes = three_times(bytes);
        return bytes;
    }
    // Returns the upper two bits of three quarters of the byte.
    template <typename Packed>
    static Packed digit(Packed bytes) {
        return field(three_quarters(bytes), 6, 3);
    }
};

// The following are ggml's K types: units of 256 weights, whose groups have scales of their own in
// steps of the unit's scale.

// Loads the scales and minima of 8 groups, which take 6 bits each in 12 bytes.
struct SixBitScales {
    static constexpr bool kHasMinimum = true;
    template <class Lanes, class Rows, class Floats = typename Lanes::Floats>
    static void scales(const Rows& units, Floats* s, Floats* m) {
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
};

// Returns codes 32 j to 32 j + 31, of 4 bits each. From `offset` on, every 32 bytes hold 64 codes:
// the first 32 in their lower halves, the next 32 in their upper halves.
template <class Bytes>
inline auto nibbles_of_two(const Bytes& bytes, int offset, int j) {
    return field(bytes.at(offset + 32 * (j / 2)), 4 * (j % 2), 15);
}

struct Q4_K : SixBitScales {
    static constexpr int kUnit = 256, kUnitBytes = 144, kGroup = 32, kBits = 4, kZero = 0;
    static constexpr int kCodesAt = 16, kCodeBytes = 128;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int j) {
        return nibbles_of_two(bytes, 0, j);
    }
};

struct Q5_K : SixBitScales {
    static constexpr int kUnit = 256, kUnitBytes = 176, kGroup = 32, kBits = 5, kZero = 0;
    static constexpr int kCodesAt = 16, kCodeBytes = 160;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int j) {
        return with_upper(nibbles_of_two(bytes, 32, j), field(bytes.at(0), j, 1), 4);
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
