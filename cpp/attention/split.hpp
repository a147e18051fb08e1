// Says how the micro-batch of one layer becomes units of work: rows of queries form tiles, and
// tiles either form bands or are cut along the entries. This depends on lengths alone, not on the
// number of threads, so that results are the same bit by bit with any number of threads.
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
    RowTile tile;  // the first tile of a band
    int chunk;
};

struct Split {
    int group;      // query heads per KV head
    int rows;       // n_tokens * group; the rows of a token are neighbours
    int tile_rows;  // rows of a full tile
    int tiles;
    int band_tiles;   // tiles of a band; one thread attends to them in turn
    bool by_rows;     // whether the prompt kernel is used
    bool by_entries;  // a unit is a range of entries of a tile, to be merged; otherwise a band

    static Split of(const LayerShape& shape, int n_tokens);

    // chunk_entries() says how many entries a unit has if the head has `total` of them; chunks()
    // says how many such units a tile has.
    int chunk_entries(int total) const;
    int chunks(int total) const;
    // Returns the most chunks of a tile with up to `most` entries; longer heads may have fewer
    // chunks, because their units are larger.
    int most_chunks(int most) const;
    // Returns how many units a head with `total` entries has.
    int units(int total) const;
    RowTile tile(int head, int number) const;
    // Returns a unit by its number within the head.
    Unit unit(int head, int number, int total) const;
};

}  // namespace entropykv
