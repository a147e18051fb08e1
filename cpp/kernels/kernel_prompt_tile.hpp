// Part of kernels.cpp: defines the scratch of the prompt kernel for a tile of entries.
// If the CPU computes products of pairs of 16-bit integers twice as fast as those of floats, q8_0
// is multiplied as integers: K and V are widened to 16 bits, and the query and the weights are
// rounded to 16 bits. That error is small, since K and V have only 8 bits. Everything else is
// computed in f32.
#pragma once

#include "kernels/kernel_convert.hpp"

namespace entropykv {
namespace {

template <KvType Type>
constexpr bool kInPairs = kFastPairs && kInt8Keys<Type>;

// Entries are scored this many at a time, from a multiple of it on, so the scores of a tile may
// begin before its first entry.
constexpr int kScoreStep = 4;
constexpr float kNatsPerBit = 0.69314718f;

struct PromptScratch {
    float* k;  // [k_stride][kPromptEntries], or pairs of K: convert_k_pairs()
    // Holds [kPromptEntries][v_stride], or pairs of V; null or pairs if V is a part of K.
    float* v;
    std::int32_t* query;    // [k_stride / 2][kRowTile] pairs of values
    float* k_scales;        // [k_blocks][kPromptEntries]
    float* v_scales;        // [kPromptEntries], for one block
    std::int32_t* weights;  // [kPromptEntries / 2][kRowTile] pairs of entries
    float* units;           // [kRowTile]: what a score of 1 is as a logit
    float* sums;            // [kRowTile] sums of the tile's weights
    float* weighted;        // [kRowTile] sums of weights times their logits
    float* factors;         // [kRowTile], by which the earlier sums are multiplied
    float* shares;          // [kRowTile], by which the tile's sums are multiplied
    float* parts;           // [kRowTile], the same for sums of integers
    float* kept;            // holds one tile if the task keeps none
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
    if (kFastPairs && layout.type != KvType::f16) {
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

// Says where the scores of a tile are kept: see PromptTask.
struct KeptTile {
    float* max;   // [kRowTile]: maxima of the tile in bits, rounded up
    float* rows;  // [entry of the tile][kRowTile]: scores, then e^(logit - max)
    float* next;  // the next tile is kept there
};

inline KeptTile kept_at(float* start, const PromptTile& tile) {
    const int before = tile.skipped / kScoreStep * kScoreStep;
    return {start, start + kRowTile - before * kRowTile, start + kKeptFloats};
}

// Calls `step<Vectors>(first row)` for the row vectors that hold rows of the task.
template <typename Wide, typename Narrow>
inline void over_rows(int rows, Wide wide, Narrow narrow) {
    int row = 0;
    for (; row + kRowVectors * kLanes <= rows; row += kRowVectors * kLanes) wide(row);
    for (; row < rows; row += kLanes) narrow(row);
}

}  // namespace
}  // namespace entropykv
