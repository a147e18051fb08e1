// How the micro-batch of one layer becomes units of work: rows of queries become tiles, tiles
// become bands or are cut along the entries. It depends on lengths alone, never on the number of
// threads, so that every number of threads gives the same result bit by bit.
#pragma once

#include "store/layer_shape.hpp"

namespace entropykv {

struct RowTile {  // rows [first, first + count) of a KV head
    int head;
    int number;
    int first;
    int count;
};

struct Unit {
    RowTile tile;  // the first one of a band
    int chunk;
};

struct Split {
    int group;      // query heads of a KV head
    int rows;       // n_tokens * group, token-major
    int tile_rows;  // of a full tile
    int tiles;
    int band_tiles;   // tiles of a band: one thread attends to them, one after the other
    bool by_rows;     // the prompt kernel
    bool by_entries;  // a unit is a range of entries of a tile, merged at the end; else a band

    static Split of(const LayerShape& shape, int n_tokens);

    // Entries of a unit where a head has `total` of them, and how many such units a tile has.
    int chunk_entries(int total) const;
    int chunks(int total) const;
    // Of so many entries or fewer: where units grow, there may be fewer of them.
    int most_chunks(int most) const;
    // Units of a head of so many entries.
    int units(int total) const;
    RowTile tile(int head, int number) const;
    // A unit by its number within the head.
    Unit unit(int head, int number, int total) const;
};

}  // namespace entropykv
