// Describes ggml's blocks of 32 weights, and its ternary ones of 256, as groups of codes with a
// scale: weight = scale * (code - kZero), or scale * code + minimum if kHasMinimum.
// Every type defines the same names: kUnit values take kUnitBytes; scales(units, s, m) loads the
// scales and minima of a unit's groups of kGroup values, with one row per lane. Codes take
// kCodeBytes from byte kCodesAt on. codes(bytes, j) returns values 32 j to 32 j + 31 from whatever
// code_bytes.hpp provides as `bytes`: all codes of one row, or four codes of every row of a tile.
#pragma once

#include "products/code_bytes.hpp"

namespace entropykv {
namespace {

struct Q4_0 {
    static constexpr int kUnit = 32, kUnitBytes = 18, kGroup = 32, kBits = 4, kZero = 8;
    static constexpr int kCodesAt = 2, kCodeBytes = 16;
    static constexpr bool kHasMinimum = false;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int) {
        return bytes.nibbles(0);
    }
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats*) {
        s[0] = Lanes::halves(units, 0);
    }
};

struct Q4_1 {
    static constexpr int kUnit = 32, kUnitBytes = 20, kGroup = 32, kBits = 4, kZero = 0;
    static constexpr int kCodesAt = 4, kCodeBytes = 16;
    static constexpr bool kHasMinimum = true;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int) {
        return bytes.nibbles(0);
    }
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats* m) {
        Lanes::two_halves(units, 0, s[0], m[0]);
    }
};

// Returns the 5-bit codes of a block: bit i of its first four bytes is the upper bit of code i.
template <class Bytes>
inline auto five_bits(const Bytes& bytes) {
    return with_upper(bytes.nibbles(4), bytes.bits(0), 4);
}

struct Q5_0 {
    static constexpr int kUnit = 32, kUnitBytes = 22, kGroup = 32, kBits = 5, kZero = 16;
    static constexpr int kCodesAt = 2, kCodeBytes = 20;
    static constexpr bool kHasMinimum = false;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int) {
        return five_bits(bytes);
    }
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats*) {
        s[0] = Lanes::halves(units, 0);
    }
};

struct Q5_1 {
    static constexpr int kUnit = 32, kUnitBytes = 24, kGroup = 32, kBits = 5, kZero = 0;
    static constexpr int kCodesAt = 4, kCodeBytes = 20;
    static constexpr bool kHasMinimum = true;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int) {
        return five_bits(bytes);
    }
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats* m) {
        Lanes::two_halves(units, 0, s[0], m[0]);
    }
};

struct Q8_0 {
    static constexpr int kUnit = 32, kUnitBytes = 34, kGroup = 32, kBits = 8;
    static constexpr int kZero = kSignedCodes ? 0 : 128;
    static constexpr int kCodesAt = 2, kCodeBytes = 32;
    static constexpr bool kHasMinimum = false;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int) {
        const auto weights = bytes.at(0);
        return kSignedCodes ? weights : flip_signs(weights);
    }
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats*) {
        s[0] = Lanes::halves(units, 0);
    }
};

struct TQ2_0 {
    static constexpr int kUnit = 256, kUnitBytes = 66, kGroup = 256, kBits = 2, kZero = 1;
    static constexpr int kCodesAt = 0, kCodeBytes = 64;
    static constexpr bool kHasMinimum = false;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int j) {
        return field(bytes.at(32 * (j / 4)), 2 * (j % 4), 3);
    }
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats*) {
        s[0] = Lanes::halves(units, 64);
    }
};

// A byte holds five ternary digits as a fraction of 256: multiplied by 3, its integer part is the
// first digit, and its fraction holds the following ones. Of the last 20 bytes, 16 have five digits
// of 16 values each, and the last four have four digits of 4.
struct TQ1_0 {
    static constexpr int kUnit = 256, kUnitBytes = 54, kGroup = 256, kBits = 2, kZero = 1;
    static constexpr int kCodesAt = 0, kCodeBytes = 52;
    static constexpr bool kHasMinimum = false;
    template <class Bytes>
    static auto codes(const Bytes& bytes, int j) {
        if (j < 5) return digit(skip(bytes.at(0), j));
        const auto tail = bytes.half(32);
        if (j < 7) return digit(bytes.join(skip(tail, 2 * j - 10), skip(tail, 2 * j - 9)));
        const auto last = bytes.fours(48, [](auto four, int digits) { return skip(four, digits); });
        return digit(bytes.join(skip(tail, 4), last));
    }
    template <class Lanes, class Rows>
    static void scales(const Rows& units, typename Lanes::Floats* s, typename Lanes::Floats*) {
        s[0] = Lanes::halves(units, 52);
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

}  // namespace
}  // namespace entropykv
