#include "attention/units.hpp"

#include <algorithm>

#include "kernels/kernels.hpp"

namespace entropykv {
namespace {

// With at least so many query heads, the prompt kernel (rows in lanes) is faster even for one
// token.
constexpr int kWideGroup = 12;
constexpr int kFewUnits = 8;  // With fewer tiles, the tiles are split by entries.
// Every band of tiles needs memory for what is observed. So many bands of a layer's heads keep all
// threads busy, and need less memory than the cache.
constexpr int kMostBands = 64;
constexpr int kRowsChunk = 256;      // fewest entries of a unit of the prompt kernel
constexpr int kMostRowsChunks = 64;  // most units of a tile of the prompt kernel

}  // namespace

Split Split::of(const LayerShape& shape, int n_tokens) {
    Split split{};
    split.group = shape.n_head / shape.n_head_kv;
    split.rows = n_tokens * split.group;
    // The decode kernel needs V in pages of its own, so it cannot serve latent attention.
    split.by_rows = n_tokens > 1 || split.group >= kWideGroup || shape.latent;
    split.tile_rows = split.by_rows ? kRowTile : split.rows;
    split.tiles = (split.rows + split.tile_rows - 1) / split.tile_rows;
    split.by_entries = !split.by_rows || split.tiles * shape.n_head_kv < kFewUnits;
    const int most_bands = std::max(1, kMostBands / shape.n_head_kv);
    split.band_tiles = split.by_entries ? split.tiles : (split.tiles + most_bands - 1) / most_bands;
    return split;
}

int Split::chunk_entries(int total) const {
    // Starting a unit costs as much as some twenty entries, and a few units per thread are enough
    // to balance the load. A unit of the prompt kernel leaves a partial result as large as a tile
    // of outputs, so their number is bounded.
    if (by_rows) return std::max(kRowsChunk, (total / kMostRowsChunks + 63) / 64 * 64);
    return total <= 1024 ? 128 : total <= 8192 ? 256 : total <= 65536 ? 512 : 1024;
}

int Split::chunks(int total) const {
    if (!by_entries) return 1;
    const int chunk = chunk_entries(total);
    return (total + chunk - 1) / chunk;
}

int Split::most_chunks(int most) const {
    if (by_entries && by_rows)
        return std::min(kMostRowsChunks, (most + kRowsChunk - 1) / kRowsChunk);
    int n = chunks(most);
    for (const int total : {1024, 8192, 65536})
        if (total < most) n = std::max(n, chunks(total));
    return n;
}

int Split::units(int total) const {
    if (by_entries) return tiles * chunks(total);
    return (tiles + band_tiles - 1) / band_tiles;
}

RowTile Split::tile(int head, int number) const {
    const int first = number * tile_rows;
    return {head, number, first, std::min(tile_rows, rows - first)};
}

Unit Split::unit(int head, int number, int total) const {
    if (!by_entries) return {tile(head, number * band_tiles), 0};
    const int n = chunks(total);
    return {tile(head, number / n), number % n};
}

}  // namespace entropykv
