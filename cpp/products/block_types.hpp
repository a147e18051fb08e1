// ggml's blocks of 32 weights, and its ternary ones of 256, as groups of codes with a scale:
// weight = scale * (code - kZero), or scale * code + minimum where kHasMinimum.
//
// Of every type: kUnit values lie in kUnitBytes; codes(unit, j) are its values 32 j to 32 j + 31 in
// their order; scales(units, s, m) are those of its groups of kGroup values, one row a lane.
#pragma once

#include "products/eight_rows.hpp"

namespace entropykv {
namespace {

struct Q4_0 {
    static constexpr int kUnit = 32, kUnitBytes = 18, kGroup = 32, kBits = 4, kZero = 8;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int) { return nibbles(load16(unit + 2)); }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats*) {
        s[0] = load_halves(units, 0);
    }
};

struct Q4_1 {
    static constexpr int kUnit = 32, kUnitBytes = 20, kGroup = 32, kBits = 4, kZero = 0;
    static constexpr bool kHasMinimum = true;
    static RowBytes codes(const std::byte* unit, int) { return nibbles(load16(unit + 4)); }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats* m) {
        s[0] = load_halves(units, 0);
        m[0] = load_halves(units, 2);
    }
};

// Bit i of four bytes is the upper one of code i.
inline RowBytes five_bits(const std::byte* bits, const std::byte* low) {
    return with_upper(nibbles(load16(low)), bits_of(load_as<std::uint32_t>(bits)), 4);
}

struct Q5_0 {
    static constexpr int kUnit = 32, kUnitBytes = 22, kGroup = 32, kBits = 5, kZero = 16;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int) { return five_bits(unit + 2, unit + 6); }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats*) {
        s[0] = load_halves(units, 0);
    }
};

struct Q5_1 {
    static constexpr int kUnit = 32, kUnitBytes = 24, kGroup = 32, kBits = 5, kZero = 0;
    static constexpr bool kHasMinimum = true;
    static RowBytes codes(const std::byte* unit, int) { return five_bits(unit + 4, unit + 8); }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats* m) {
        s[0] = load_halves(units, 0);
        m[0] = load_halves(units, 2);
    }
};

struct Q8_0 {
    static constexpr int kUnit = 32, kUnitBytes = 34, kGroup = 32, kBits = 8;
    static constexpr int kZero = kSignedCodes ? 0 : 128;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int) {
        const RowBytes weights = load32(unit + 2);
        return kSignedCodes ? weights : flip_signs(weights);
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats*) {
        s[0] = load_halves(units, 0);
    }
};

struct TQ2_0 {
    static constexpr int kUnit = 256, kUnitBytes = 66, kGroup = 256, kBits = 2, kZero = 1;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int j) {
        return field(load32(unit + 32 * (j / 4)), 2 * (j % 4), 3);
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats*) {
        s[0] = load_halves(units, 64);
    }
};

// Five ternary digits a byte, as fractions of 256: the digit is what is before the point when the
// byte is multiplied by 3, the following digits are what is behind it.
struct TQ1_0 {
    static constexpr int kUnit = 256, kUnitBytes = 54, kGroup = 256, kBits = 2, kZero = 1;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int j) {
        if (j < 5) return digit(skip(load32(unit), j));
        const HalfBytes tail = load16(unit + 32);
        if (j < 7) return digit(pair(skip(tail, 2 * j - 10), skip(tail, 2 * j - 9)));
        const HalfBytes last = four_bytes(unit + 48);
        return digit(
            pair(skip(tail, 4), first_fours(last, skip(last, 1), skip(last, 2), skip(last, 3))));
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats*) {
        s[0] = load_halves(units, 52);
    }

private:
    template <typename Bytes>
    static Bytes skip(Bytes bytes, int digits) {
        for (int i = 0; i < digits; ++i) bytes = three_times(bytes);
        return bytes;
    }
    // Of three quarters of the byte, the upper two bits.
    static RowBytes digit(RowBytes bytes) { return field(three_quarters(bytes), 6, 3); }
};

}  // namespace
}  // namespace entropykv
