// Part of kernels.cpp: what the prompt kernel holds of a tile of entries, and where.
//
// Where products of pairs of 16-bit integers are twice as fast as those of floats, q8_0 is worked
// on as integers: K and V are widened to 16 bits, and the query and the weights are rounded to 16
// bits, which is little next to K and V with their 8. All else is worked on in f32.
#pragma once

#include "kernels/kernel_convert_pairs.hpp"

namespace entropykv {
namespace {

template <KvType Type>
constexpr bool kInPairs = kFastPairs && Type == KvType::q8_0;

// Entries of a tile are scored four at a time: so far before the first one its scores begin.
constexpr int kScoreStep = 4;
constexpr float kNatsPerBit = 0.69314718f;

struct PromptScratch {
    float* k;               // [k_stride][kPromptEntries], or pairs of K: convert_k_pairs()
    float* v;               // [kPromptEntries][v_stride], or pairs of V; V of K: nothing or pairs
    std::int32_t* query;    // [k_stride / 2][kRowTile] pairs of values
    float* k_scales;        // [k_blocks][kPromptEntries]
    float* v_scales;        // [kPromptEntries], of one block
    std::int32_t* weights;  // [kPromptEntries / 2][kRowTile] pairs of entries
    float* units;           // [kRowTile]: what a score of 1 is as a logit
    float* sums;            // [kRowTile] of the tile's weights
    float* weighted;        // [kRowTile] of weights times their logits
    float* factors;         // [kRowTile], of what was summed before the tile
    float* shares;          // [kRowTile], of what the tile adds
    float* parts;           // [kRowTile], of what the tile adds as integers
    float* kept;            // a tile's, where the task keeps none
};

inline PromptScratch split_scratch(const PromptTask& task) {
    const PageLayout& layout = *task.entries.layout;
    float* next = task.scratch;
    const auto take = [&](int n) {
        float* taken = next;
        next += n;
        return taken;
    };
    const auto take_ints = [&](int n) { return reinterpret_cast<std::int32_t*>(take(n)); };
    PromptScratch scratch{};
    if (kFastPairs && layout.type == KvType::q8_0) {
        scratch.k = take(kPromptEntries / 2 * layout.k_stride);
        scratch.v = take(kPromptEntries / 2 * layout.v_stride);
        scratch.query = take_ints(kRowTile / 2 * layout.k_stride);
        scratch.k_scales = take(kPromptEntries * layout.k_blocks);
        scratch.v_scales = take(kPromptEntries);
        scratch.weights = take_ints(kPromptEntries / 2 * kRowTile);
    } else {
        scratch.k = take(kPromptEntries * layout.k_stride);
        scratch.v = take(layout.latent ? 0 : kPromptEntries * layout.v_stride);
    }
    for (float** rows : {&scratch.units, &scratch.sums, &scratch.weighted, &scratch.factors,
                         &scratch.shares, &scratch.parts})
        *rows = take(kRowTile);
    scratch.kept = take(kKeptFloats);
    return scratch;
}

// What is kept of a tile: see PromptTask.
struct KeptTile {
    float* max;   // [kRowTile], of the tile, in bits, rounded up
    float* rows;  // [entry of the tile][kRowTile]: scores, then e^(logit - max)
    float* next;  // the tile behind it
};

inline KeptTile kept_at(float* start, const PromptTile& tile) {
    const int before = tile.skipped / kScoreStep * kScoreStep;
    return {start, start + kRowTile - before * kRowTile, start + kKeptFloats};
}

// Runs `step<Vectors>(first row)` over the row vectors that hold the task's rows.
template <typename Wide, typename Narrow>
inline void over_rows(int rows, Wide wide, Narrow narrow) {
    int row = 0;
    for (; row + kRowVectors * kLanes <= rows; row += kRowVectors * kLanes) wide(row);
    for (; row < rows; row += kLanes) narrow(row);
}

}  // namespace
}  // namespace entropykv
