// The micro-batch that is attended to: its tokens, and which of its queries tell what entries are
// worth.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/split.hpp"
#include "decide/importance.hpp"

namespace entropykv {

struct Step {
    ImportanceSettings importance;
    int n_tokens = 0;  // those of an echo too
    int n_text = 0;    // before the echo
    std::int32_t base_position = 0;
    bool observing = false;   // its queries count towards importance
    bool looking_up = false;  // those of its echo tell what predictions should have said
    bool recalling = false;   // frozen entries are looked for

    // The first query row that is observed, its tile, and bands with rows of the observation
    // window, and of an echo.
    int first_observed_row(const Split& split) const;
    int first_observed_tile(const Split& split) const {
        return first_observed_row(split) / split.tile_rows;
    }
    int observed_bands(const Split& split) const;
    bool observes(const Split& split, const RowTile& tile) const {
        return (observing || looking_up) && first_observed_row(split) < tile.first + tile.count;
    }
    // The first row of the echo, and where the rows end that count towards importance.
    int first_echo_row(const Split& split) const { return n_text * split.group; }
    int end_of_counted_rows(const Split& split) const {
        return (looking_up ? n_text : n_tokens) * split.group;
    }
    // The band of a tile, counted from the first observed one.
    int band_of(const Split& split, int tile) const {
        return tile / split.band_tiles - first_observed_tile(split) / split.band_tiles;
    }

    // Whether the weights of a tile stay until they are observed, and how many floats they are of a
    // tile that sees so many entries or fewer.
    bool keeps_weights(const Split& split, int total) const noexcept;
    std::size_t most_kept_floats(const Split& split, int most) const noexcept;

    // The oldest position that a token sees, relative to the first token.
    float oldest_relative(const LayerShape& shape, int token) const noexcept {
        return static_cast<float>(shape.oldest_seen(base_position + token) - base_position);
    }
};

}  // namespace entropykv
