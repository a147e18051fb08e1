#include "attention/step.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/kernels.hpp"

namespace entropykv {
namespace {

// With at least this many query heads per KV head, the prompt kernel (rows in lanes) is faster even
// for one token.
constexpr int kWideGroup = 12;
// With fewer tiles in all KV heads of a layer, the tiles are split by entries.
constexpr int kFewUnits = 8;
// Every band of tiles needs memory for what is observed. This many bands, of all heads of a layer
// together, keep all threads busy, and need less memory than the cache.
constexpr int kMostBands = 64;
constexpr int kRowsChunk = 256;      // fewest entries of a unit of the prompt kernel
constexpr int kMostRowsChunks = 64;  // most units of a tile of the prompt kernel
constexpr int kMostKept = 8192;  // With more entries, weights are computed again to be observed.

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

UnitQueue::UnitQueue(int n_heads)
    : first_unit_(index(n_heads + 1)),
      unfinished_units_(std::make_unique<std::atomic<int>[]>(index(n_heads))),
      next_unit_(std::make_unique<std::atomic<int>[]>(index(n_heads))) {}

std::vector<float> alibi_slopes(int n_head, float max_bias) {
    int power = 1;  // becomes the largest power of 2 that is not above n_head
    while (2 * power <= n_head) power *= 2;
    const auto base = [&](float bias) { return std::pow(2.0f, -bias / static_cast<float>(power)); };
    std::vector<float> slopes(static_cast<std::size_t>(n_head));
    for (int head = 0; head < n_head; ++head)
        slopes[static_cast<std::size_t>(head)] =
            head < power
                ? std::pow(base(max_bias), static_cast<float>(head + 1))
                : std::pow(base(max_bias / 2.0f), static_cast<float>(2 * (head - power) + 1));
    return slopes;
}

Step Step::of_token(int token, int scoring_interval) const {
    Step step = *this;
    step.n_tokens = step.n_text = 1;
    step.n_drafts = 0;
    step.base_position = base_position + token;
    step.observing = importance.measure().observes(1, step.base_position, scoring_interval);
    return step;
}

int Step::first_observed_row(const Split& split) const {
    // All queries of an echo count. Measure reconstruct counts no other queries if there is an
    // echo.
    const bool echo_alone =
        n_text < n_tokens && (importance.measure().of_echoes || (observing_echo && !observing));
    const int first = echo_alone ? n_text : n_text - importance.observation_window;
    return std::max(0, first) * split.group;
}

int Step::observed_bands(const Split& split) const {
    return (split.tiles - 1) / split.band_tiles - first_observed_tile(split) / split.band_tiles + 1;
}

bool Step::keeps_weights(const Split& split, int total) const noexcept {
    return (observing || observing_echo) && split.by_rows && !split.by_entries &&
           total <= kMostKept && importance.measure().statistic != Statistic::product;
}

std::size_t Step::most_kept_floats(const Split& split, int most) const noexcept {
    const int total = std::min(most, kMostKept);
    if (!keeps_weights(split, total)) return 0;
    // The entries lie in up to three ranges, each of which may begin inside a tile.
    const auto tiles = static_cast<std::size_t>(total / kEntryTile + 3);
    return tiles * static_cast<std::size_t>(kKeptFloats);
}

}  // namespace entropykv
