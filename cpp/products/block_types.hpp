// ggml's blocks of 32 weights, and its ternary ones of 256, as groups of codes with a scale:
// weight = scale * (code - kZero), or scale * code + minimum where kHasMinimum.
//
// Of every type: kUnit values lie in kUnitBytes; codes(unit, j) are its values 32 j to 32 j + 31 in
// their order; scales(units, s, m) are those of its groups of kGroup values, one row a lane.
// unpack(units, j, put) are the values kSpan j to kSpan (j + 1) - 1 of 8 rows, in any order:
// put(i, codes) gets the values 4 i to 4 i + 3 of all of them, four bytes of each row.
#pragma once

#include "products/eight_rows.hpp"

namespace entropykv {
namespace {

// 16 bytes hold 16 codes in their lower and the next 16 in their upper halves.
template <class Put>
inline void unpack_nibbles(const RowPointers& units, std::size_t offset, Put put) {
    RowBytes packed[4];
    load_columns(units, offset, packed);
    for (int i = 0; i < 4; ++i) {
        put(i, field(packed[i], 0, 15));
        put(i + 4, field(packed[i], 4, 15));
    }
}

// What has no layout of columns: 32 codes of each row, then four of each.
template <class Type, class Put>
inline void unpack_rows_of(const RowPointers& units, int j, Put put) {
    RowBytes codes[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) codes[r] = Type::codes(units[r], j);
    transpose(codes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) put(i, codes[i]);
}

struct Q4_0 {
    static constexpr int kUnit = 32, kUnitBytes = 18, kGroup = 32, kBits = 4, kZero = 8;
    static constexpr int kSpan = 32;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int) { return nibbles(load16(unit + 2)); }
    template <class Put>
    static void unpack(const RowPointers& units, int, Put put) {
        unpack_nibbles(units, 2, put);
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats*) {
        s[0] = load_halves(units, 0);
    }
};

struct Q4_1 {
    static constexpr int kUnit = 32, kUnitBytes = 20, kGroup = 32, kBits = 4, kZero = 0;
    static constexpr int kSpan = 32;
    static constexpr bool kHasMinimum = true;
    static RowBytes codes(const std::byte* unit, int) { return nibbles(load16(unit + 4)); }
    template <class Put>
    static void unpack(const RowPointers& units, int, Put put) {
        unpack_nibbles(units, 4, put);
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats* m) {
        load_two_halves(units, 0, s[0], m[0]);
    }
};

// Bit i of four bytes is the upper one of code i.
inline RowBytes five_bits(const std::byte* bits, const std::byte* low) {
    return with_upper(nibbles(load16(low)), bits_of(load_as<std::uint32_t>(bits)), 4);
}

struct Q5_0 {
    static constexpr int kUnit = 32, kUnitBytes = 22, kGroup = 32, kBits = 5, kZero = 16;
    static constexpr int kSpan = 32;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int) { return five_bits(unit + 2, unit + 6); }
    template <class Put>
    static void unpack(const RowPointers& units, int j, Put put) {
        unpack_rows_of<Q5_0>(units, j, put);
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats*) {
        s[0] = load_halves(units, 0);
    }
};

struct Q5_1 {
    static constexpr int kUnit = 32, kUnitBytes = 24, kGroup = 32, kBits = 5, kZero = 0;
    static constexpr int kSpan = 32;
    static constexpr bool kHasMinimum = true;
    static RowBytes codes(const std::byte* unit, int) { return five_bits(unit + 4, unit + 8); }
    template <class Put>
    static void unpack(const RowPointers& units, int j, Put put) {
        unpack_rows_of<Q5_1>(units, j, put);
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats* m) {
        load_two_halves(units, 0, s[0], m[0]);
    }
};

struct Q8_0 {
    static constexpr int kUnit = 32, kUnitBytes = 34, kGroup = 32, kBits = 8;
    static constexpr int kZero = kSignedCodes ? 0 : 128;
    static constexpr int kSpan = 32;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int) {
        const RowBytes weights = load32(unit + 2);
        return kSignedCodes ? weights : flip_signs(weights);
    }
    template <class Put>
    static void unpack(const RowPointers& units, int, Put put) {
        for (int piece = 0; piece < 2; ++piece) {
            RowBytes weights[4];
            load_columns(units, static_cast<std::size_t>(2 + 16 * piece), weights);
            for (int i = 0; i < 4; ++i)
                put(4 * piece + i, kSignedCodes ? weights[i] : flip_signs(weights[i]));
        }
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats*) {
        s[0] = load_halves(units, 0);
    }
};

struct TQ2_0 {
    static constexpr int kUnit = 256, kUnitBytes = 66, kGroup = 256, kBits = 2, kZero = 1;
    static constexpr int kSpan = 128;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int j) {
        return field(load32(unit + 32 * (j / 4)), 2 * (j % 4), 3);
    }
    template <class Put>
    static void unpack(const RowPointers& units, int j, Put put) {
        for (int piece = 0; piece < 2; ++piece) {
            RowBytes packed[4];
            load_columns(units, static_cast<std::size_t>(32 * j + 16 * piece), packed);
            for (int i = 0; i < 4; ++i)
                for (int f = 0; f < 4; ++f) put(8 * f + 4 * piece + i, field(packed[i], 2 * f, 3));
        }
    }
    static void scales(const RowPointers& units, RowFloats* s, RowFloats*) {
        s[0] = load_halves(units, 64);
    }
};

// Five ternary digits a byte, as fractions of 256: the digit is what is before the point when the
// byte is multiplied by 3, the following digits are what is behind it.
struct TQ1_0 {
    static constexpr int kUnit = 256, kUnitBytes = 54, kGroup = 256, kBits = 2, kZero = 1;
    static constexpr int kSpan = 32;
    static constexpr bool kHasMinimum = false;
    static RowBytes codes(const std::byte* unit, int j) {
        if (j < 5) return digit(skip(load32(unit), j));
        const HalfBytes tail = load16(unit + 32);
        if (j < 7) return digit(pair(skip(tail, 2 * j - 10), skip(tail, 2 * j - 9)));
        const HalfBytes last = four_bytes(unit + 48);
        return digit(
            pair(skip(tail, 4), first_fours(last, skip(last, 1), skip(last, 2), skip(last, 3))));
    }
    template <class Put>
    static void unpack(const RowPointers& units, int j, Put put) {
        unpack_rows_of<TQ1_0>(units, j, put);
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
