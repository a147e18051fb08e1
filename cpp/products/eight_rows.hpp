// Registers over 8 rows of weights, behind the same names on every instruction set: what the
// kernels of products are made of. Everything lives in an unnamed namespace, so that no function
// built for one instruction set is ever linked into another.
//
// RowBytes are 32 codes of one row (HalfBytes: 16), RowInts and RowFloats have a value of each of 8
// rows, Partial holds sums of products of one row's codes that are still spread over lanes.
//
// field(): bits `shift` and up of every byte, as many as the mask has; with_upper() puts bits above
// others; bits_of() makes every bit a byte, 0 or 1; three_quarters() rounds down; first_fours() are
// the first 4 bytes of four registers.
// add_products() multiplies codes with activations: codes are unsigned, but those of 8 bits are
// signed where kSignedCodes is. reduce_halves() sums up the first and the last 16 of all 32 codes
// (kSplit asked add_products() to keep them apart), reduce() all of them.
// load_halves() loads the f16 at an offset of every row, load_two_halves() it and the next one.
// load_columns() loads 16 codes of every row: four of each row a register, in their order.
// round_16() rounds 16 activations times `inverse`, and returns the sum of their codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace entropykv {
namespace {

constexpr int kRows = 8;
using RowPointers = const std::byte* [kRows];

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
