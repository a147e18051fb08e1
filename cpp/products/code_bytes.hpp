// Reads the codes of blocks in two ways with the same names: the bytes of one row, or columns of a
// tile, that is four bytes of each row in one register. The block types say which bits of which
// bytes form a code, once for both: see block_types.hpp.
// Of codes 32 j to 32 j + 31, a row returns all, and a column four of every row. at(offset) returns
// the 32 bytes from there on; half(offset) 16 bytes, for codes in two halves that join() puts
// together; nibbles(offset) 16 bytes, whose lower halves and then upper halves are codes;
// bits(offset) the bits of 4 bytes; fours(offset, change) 4 bytes as change(bytes, 0) to
// change(bytes, 3) make them, one after the other.
#pragma once

#include <algorithm>

#include "products/tile_registers.hpp"

namespace entropykv {
namespace {

class RowCodes {
public:
    explicit RowCodes(const std::byte* bytes) : bytes_(bytes) {}

    RowBytes at(int offset) const { return load32(bytes_ + offset); }
    HalfBytes half(int offset) const { return load16(bytes_ + offset); }
    RowBytes nibbles(int offset) const { return entropykv::nibbles(half(offset)); }
    RowBytes bits(int offset) const { return bits_of(load_as<std::uint32_t>(bytes_ + offset)); }
    RowBytes join(HalfBytes lower, HalfBytes upper) const { return pair(lower, upper); }
    template <class Change>
    HalfBytes fours(int offset, Change change) const {
        const HalfBytes four = four_bytes(bytes_ + offset);
        return first_fours(change(four, 0), change(four, 1), change(four, 2), change(four, 3));
    }

private:
    const std::byte* bytes_;
};

// Reads the quantised codes 4 * `four` to 4 * `four` + 3 of a block of 32, for as many rows as a
// register of the tile holds.
class ColumnCodes {
public:
    ColumnCodes(const std::byte* columns, int four) : columns_(columns), four_(four) {}

    TileBytes at(int offset) const { return column(offset / 4 + four_); }
    TileBytes half(int offset) const { return column(offset / 4 + four_ % 4); }
    TileBytes nibbles(int offset) const { return field(half(offset), four_ < 4 ? 0 : 4, 15); }
    TileBytes bits(int offset) const { return four_bits(column(offset / 4), four_); }
    TileBytes join(TileBytes lower, TileBytes upper) const { return four_ < 4 ? lower : upper; }
    template <class Change>
    TileBytes fours(int offset, Change change) const {
        return change(column(offset / 4), four_ % 4);
    }

private:
    TileBytes column(int i) const { return load_tile_bytes(columns_ + 4 * kTileRows * i); }

    const std::byte* columns_;
    int four_;
};

// Says how many columns hold the packed bytes of a unit. A column has 4 bytes of every row of a
// tile.
template <class Type>
constexpr int kColumns = Type::kCodeBytes / 4;

template <class Type>
inline void load_unit(const Rows& rows, std::byte* columns) {
#pragma GCC unroll 12
    for (int i = 0; i < kColumns<Type>; i += 4) {
        // The last 16 bytes overlap earlier ones if fewer than 16 are left.
        const int first = i + 4 <= kColumns<Type> ? i : kColumns<Type> - 4;
        ColumnRows::Bytes column[4];
        ColumnRows::columns(rows, static_cast<std::size_t>(Type::kCodesAt + 4 * first), column);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k)
            ColumnRows::store(columns + 4 * kTileRows * (first + k), column[k]);
    }
}

}  // namespace
}  // namespace entropykv
