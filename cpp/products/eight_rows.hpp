// Defines registers over 8 rows of weights, with the same names on every instruction set, for the
// kernels of products. Everything is in an unnamed namespace, so that no function built for one
// instruction set is ever linked into the code for another one.
// RowBytes are 32 codes of one row (HalfBytes: 16), RowInts and RowFloats have a value of each of 8
// rows, Partial holds sums of products of one row's codes that are still spread over lanes.
// field() returns the bits from `shift` on of every byte, as many as the mask has; with_upper()
// puts bits above others; bits_of() makes every bit a byte, 0 or 1; three_quarters() rounds down;
// first_fours() returns the first 4 bytes of four registers. add_products() multiplies codes with
// activations: codes are unsigned, but those of 8 bits are signed if kSignedCodes is true.
// reduce_halves() sums up the first and the last 16 of all 32 codes (kSplit asked add_products() to
// keep them apart), reduce() all of them. EightRows::halves() loads the f16 at an offset of every
// row, two_halves() that one and the next, columns() 16 bytes, four of each row per register, in
// their order. low_halves() and high_halves() return the f16 in the first and the last two of four
// bytes, unsigned_bytes() and signed_bytes() their byte k. round_16() rounds 16 activations times
// `inverse`, and returns the sum of their codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace entropykv {
namespace {

constexpr int kRows = 8;

// Hides from the compiler where a value comes from. Otherwise it would keep a pointer for every row
// of a tile, which is more than there are registers.
template <typename T>
inline T hidden(T value) {
    __asm__("" : "+r"(value));
    return value;
}

// Points to rows of weights that are `stride` bytes apart.
class Rows {
public:
    Rows(const std::byte* first, std::size_t stride) : Rows(first, stride, hidden(3 * stride)) {}

    const std::byte* operator[](int row) const {
        return first_ + static_cast<std::size_t>(row) * stride_;
    }
    // Returns one of the first four rows.
    const std::byte* near(int row) const { return row == 3 ? first_ + thrice_ : (*this)[row]; }
    // Return the rows from number `row` on, and all rows from their byte `bytes` on.
    Rows from(int row) const { return {hidden((*this)[row]), stride_, thrice_}; }
    Rows after(std::size_t bytes) const { return {hidden(first_ + bytes), stride_, thrice_}; }

private:
    Rows(const std::byte* first, std::size_t stride, std::size_t thrice)
        : first_(first), stride_(stride), thrice_(thrice) {}

    const std::byte* first_;
    std::size_t stride_, thrice_;
};

// Points to rows of weights that lie anywhere.
class RowPointers {
public:
    explicit RowPointers(const std::byte* const* rows) : rows_(rows) {}
    const std::byte* operator[](int row) const { return rows_[row]; }
    const std::byte* near(int row) const { return rows_[row]; }
    RowPointers from(int row) const { return RowPointers(rows_ + row); }

private:
    const std::byte* const* rows_;
};

template <typename T>
inline T load_as(const std::byte* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

}  // namespace
}  // namespace entropykv

#if defined(__AVX2__)
#include "products/registers_x86.hpp"
#else
#include "products/registers_neon.hpp"
#endif
