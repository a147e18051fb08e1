// Describes the micro-batch that is being attended to: its tokens, what the graph tells about their
// attention, how the attention of a layer is split into units of work, which of ggml's threads
// takes which unit, and which queries count towards the importance of entries.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "decide/importance.hpp"
#include "kernels/kernels.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

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

// Names the query rows [first, first + count) of a KV head.
struct RowTile {
    int head;
    int number;
    int first;
    int count;
};

struct Unit {
    RowTile tile;  // the first one, if the unit is a band
    int chunk;     // which range of the tile's entries; 0 if the unit is a band
};

// Says how the attention of a layer becomes units of work: rows of queries form tiles, and tiles
// either form bands or are cut along the entries. This depends on lengths alone, not on the number
// of threads, so that results are the same bit for bit with any number of threads.
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
    // Returns the unit of work with this number, from 0 on, of a KV head that attends to `total`
    // entries.
    Unit unit(int head, int number, int total) const;
};

inline Split Split::of(const LayerShape& shape, int n_tokens) {
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

inline int Split::chunk_entries(int total) const {
    // Starting a unit costs as much as some twenty entries, and a few units per thread are enough
    // to balance the load. A unit of the prompt kernel leaves a partial result as large as a tile
    // of outputs, so their number is bounded.
    if (by_rows) return std::max(kRowsChunk, (total / kMostRowsChunks + 63) / 64 * 64);
    return total <= 1024 ? 128 : total <= 8192 ? 256 : total <= 65536 ? 512 : 1024;
}

inline int Split::chunks(int total) const {
    if (!by_entries) return 1;
    const int chunk = chunk_entries(total);
    return (total + chunk - 1) / chunk;
}

inline int Split::most_chunks(int most) const {
    if (by_entries && by_rows)
        return std::min(kMostRowsChunks, (most + kRowsChunk - 1) / kRowsChunk);
    int n = chunks(most);
    for (const int total : {1024, 8192, 65536})
        if (total < most) n = std::max(n, chunks(total));
    return n;
}

inline int Split::units(int total) const {
    if (by_entries) return tiles * chunks(total);
    return (tiles + band_tiles - 1) / band_tiles;
}

inline RowTile Split::tile(int head, int number) const {
    const int first = number * tile_rows;
    return {head, number, first, std::min(tile_rows, rows - first)};
}

inline Unit Split::unit(int head, int number, int total) const {
    if (!by_entries) return {tile(head, number * band_tiles), 0};
    const int n = chunks(total);
    return {tile(head, number / n), number % n};
}

// Holds the units of one reader of a layer that no thread has claimed yet.
class UnitQueue {
public:
    // Says where a thread looks for its next unit.
    struct Cursor {
        bool others = false;
        int head = 0;
    };

    explicit UnitQueue(int n_heads)
        : first_unit_(index(n_heads + 1)),
          unfinished_units_(std::make_unique<std::atomic<int>[]>(index(n_heads))),
          next_unit_(std::make_unique<std::atomic<int>[]>(index(n_heads))) {}

    // Must be called before a layer; units_of(head) returns how many units a KV head has.
    template <typename UnitsOf>
    void fill(UnitsOf units_of) noexcept {
        int units = 0;
        for (int h = 0; h < n_heads(); ++h) {
            const int of_head = units_of(h);
            first_unit_[index(h)] = units;
            unfinished_units_[index(h)].store(of_head, std::memory_order_relaxed);
            next_unit_[index(h)].store(units, std::memory_order_relaxed);
            units += of_head;
        }
        first_unit_[index(n_heads())] = units;
        unfinished_heads_.store(n_heads(), std::memory_order_relaxed);
    }

    // Claims a unit of the heads that this thread owns, or else of another head; -1 if there is
    // none left.
    template <typename Owns>
    int claim(Cursor& cursor, Owns owns) noexcept {
        while (true) {
            for (; cursor.head < n_heads(); ++cursor.head) {
                if (owns(cursor.head) == cursor.others) continue;
                std::atomic<int>& next = next_unit_[index(cursor.head)];
                const int unit = next.fetch_add(1, std::memory_order_relaxed);
                if (unit < first_unit_[index(cursor.head + 1)]) return unit;
            }
            if (cursor.others) return -1;
            cursor = {true, 0};
        }
    }

    int first_unit(int head) const { return first_unit_[index(head)]; }
    int head_of(int unit) const {
        int head = 0;
        while (unit >= first_unit_[index(head + 1)]) ++head;
        return head;
    }

    // ends_head() is called after each unit, and tells whether it was the last one of its head;
    // ends_layer() is called after each head, and tells whether it was the last one of the layer.
    bool ends_head(int head) noexcept {
        return unfinished_units_[index(head)].fetch_sub(1, std::memory_order_acq_rel) == 1;
    }
    bool ends_layer() noexcept {
        return unfinished_heads_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    }

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    int n_heads() const { return static_cast<int>(first_unit_.size()) - 1; }

    std::vector<int> first_unit_;  // first unit of each head, then the number of units
    std::unique_ptr<std::atomic<int>[]> unfinished_units_;
    std::unique_ptr<std::atomic<int>[]> next_unit_;  // next unit of each head
    std::atomic<int> unfinished_heads_{0};
};

// Holds the constants of one layer's attention.
struct AttentionParams {
    float scale = 1.0f;
    float softcap = 0.0f;          // 0: logits are not capped
    const float* sinks = nullptr;  // one logit per query head, or null
    // By how much a logit falls per position of distance (ALiBi): one value per query head, or
    // null.
    const float* slopes = nullptr;
};

// Returns ALiBi's slopes, as ggml computes them from the op_params of a flash attention node.
inline std::vector<float> alibi_slopes(int n_head, float max_bias) {
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

// Refers to f32 rows of one micro-batch, [n_tokens][n_head][dim], by strides in bytes.
struct RowsView {
    const std::byte* data;
    std::size_t token_stride;
    std::size_t head_stride;
    const float* row(int token, int head) const {
        return reinterpret_cast<const float*>(data +
                                              static_cast<std::size_t>(token) * token_stride +
                                              static_cast<std::size_t>(head) * head_stride);
    }
    // Returns the view without the rows of the first `token` tokens.
    RowsView from(int token) const {
        return {data + static_cast<std::size_t>(token) * token_stride, token_stride, head_stride};
    }
};

// Says what one sequence reads in a micro-batch: see Attention::begin().
struct StepTokens {
    int n_text = 0;
    std::int32_t position = 0;       // position of the first token in the text
    std::int32_t rope_position = 0;  // position at which RoPE sees that token
    int n_echo = 0;
    int n_drafts = 0;
    bool see_all = false;
    bool recalls = true;

    int n_tokens() const { return n_text + n_echo; }
};

struct Step {
    ImportanceSettings importance;
    int n_tokens = 0;  // includes the tokens of an echo
    int n_text = 0;    // tokens before the echo
    int n_drafts = 0;  // tokens of the text, the last ones, that may turn out to be wrong
    std::int32_t base_position = 0;
    bool observing = false;       // whether the step's queries count towards importance
    bool observing_echo = false;  // whether the echo's queries raise predicted shares
    bool recalling = false;       // whether frozen entries may be recalled
    bool see_all = false;         // whether tokens attend to later ones, too

    // Returns the step of one token of a run with drafts, as if it was read alone.
    Step of_token(int token, int scoring_interval) const;

    // Return the first query row that is observed, its tile, and how many bands have observed rows
    // (of the observation window or of an echo).
    int first_observed_row(const Split& split) const;
    int first_observed_tile(const Split& split) const {
        return first_observed_row(split) / split.tile_rows;
    }
    int observed_bands(const Split& split) const;
    bool observes(const Split& split, const RowTile& tile) const {
        return (observing || observing_echo) && first_observed_row(split) < tile.first + tile.count;
    }
    // Return the first row of the echo, and the end of the rows that count towards importance.
    int first_echo_row(const Split& split) const { return n_text * split.group; }
    int end_of_counted_rows(const Split& split) const {
        return (observing_echo ? n_text : n_tokens) * split.group;
    }
    // Returns the band of a tile, counted from the first observed one.
    int band_of(const Split& split, int tile) const {
        return tile / split.band_tiles - first_observed_tile(split) / split.band_tiles;
    }

    // keeps_weights() tells whether the attention weights of a tile are kept until they are
    // observed; most_kept_floats() returns their size for a tile that attends to `most` entries or
    // fewer.
    bool keeps_weights(const Split& split, int total) const noexcept;
    std::size_t most_kept_floats(const Split& split, int most) const noexcept;

    // Returns the last token of the micro-batch that a token may attend to.
    int last_seen(int token) const noexcept { return see_all ? n_tokens - 1 : token; }

    // Returns the oldest position that a token may attend to, relative to the first token.
    float oldest_relative(const LayerShape& shape, int token) const noexcept {
        return static_cast<float>(shape.oldest_seen(base_position + token) - base_position);
    }
};

inline Step Step::of_token(int token, int scoring_interval) const {
    Step step = *this;
    step.n_tokens = step.n_text = 1;
    step.n_drafts = 0;
    step.base_position = base_position + token;
    step.observing = importance.measure().observes(1, step.base_position, scoring_interval);
    return step;
}

inline int Step::first_observed_row(const Split& split) const {
    // All queries of an echo count. Measure reconstruct counts no other queries if there is an
    // echo.
    const bool echo_alone =
        n_text < n_tokens && (importance.measure().of_echoes || (observing_echo && !observing));
    const int first = echo_alone ? n_text : n_text - importance.observation_window;
    return std::max(0, first) * split.group;
}

inline int Step::observed_bands(const Split& split) const {
    return (split.tiles - 1) / split.band_tiles - first_observed_tile(split) / split.band_tiles + 1;
}

inline bool Step::keeps_weights(const Split& split, int total) const noexcept {
    return (observing || observing_echo) && split.by_rows && !split.by_entries &&
           total <= kMostKept && importance.measure().statistic != Statistic::product;
}

inline std::size_t Step::most_kept_floats(const Split& split, int most) const noexcept {
    const int total = std::min(most, kMostKept);
    if (!keeps_weights(split, total)) return 0;
    // The entries lie in up to three ranges, each of which may begin inside a tile.
    const auto tiles = static_cast<std::size_t>(total / kEntryTile + 3);
    return tiles * static_cast<std::size_t>(kKeptFloats);
}

}  // namespace entropykv
