// Part of kernels.cpp: computes q.k of a tile of entries for many query rows, which are in the
// lanes.
#pragma once

#include "kernels/kernel_prompt_tile.hpp"

namespace entropykv {
namespace {

// Computes scores[kScoreStep][kRowTile] of kScoreStep entries for Vectors * kLanes query rows.
template <int Vectors>
inline void score_block(const float* query, const float* k, int stride, float* scores) {
    Vec sums[kScoreStep][Vectors];
    for (int e = 0; e < kScoreStep; ++e)
        for (int i = 0; i < Vectors; ++i) sums[e][i] = zero();
    for (int d = 0; d < stride; ++d) {
        Vec q[Vectors];
        for (int i = 0; i < Vectors; ++i) q[i] = load(query + d * kRowTile + i * kLanes);
        for (int e = 0; e < kScoreStep; ++e) {
            const Vec value = broadcast(k[d * kPromptEntries + e]);
            for (int i = 0; i < Vectors; ++i) sums[e][i] = multiply_add(value, q[i], sums[e][i]);
        }
    }
    for (int e = 0; e < kScoreStep; ++e)
        for (int i = 0; i < Vectors; ++i) store(scores + e * kRowTile + i * kLanes, sums[e][i]);
}

// Multiplies queries with keys in integers, for one block of n pairs of values, and adds the scores
// to those of earlier blocks.
template <int Vectors>
ENTROPYKV_NOINLINE void score_pairs(const std::int32_t* query, const std::int32_t* k, int n,
                                    const float* k_scales, bool first, float* scores) {
    IntVec sums[kScoreStep][Vectors];
    repeat<kScoreStep>([&](auto e) ENTROPYKV_INLINE {
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE { sums[e][i] = broadcast_int(0); });
    });
    for (int pair = 0; pair < n; ++pair) {
        IntVec q[Vectors];
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
            q[i] = load_ints(query + pair * kRowTile + i * kLanes);
        });
        repeat<kScoreStep>([&](auto e) ENTROPYKV_INLINE {
            const IntVec value = broadcast_int(k[pair * kPromptEntries + e]);
            repeat<Vectors>(
                [&](auto i) ENTROPYKV_INLINE { sums[e][i] = dot_pairs(sums[e][i], value, q[i]); });
        });
    }
    repeat<kScoreStep>([&](auto e) ENTROPYKV_INLINE {
        const Vec scale = broadcast(k_scales[e]);
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
            float* at = scores + e * kRowTile + i * kLanes;
            store(at, multiply_add(to_float(sums[e][i]), scale, first ? zero() : load(at)));
        });
    });
}

template <int Vectors, bool Pairs>
inline void score_rows(const PromptTask& task, const PromptScratch& scratch, int row, int first,
                       int last, float* scores) {
    const PageLayout& layout = *task.entries.layout;
    for (int e = first; e < last; e += kScoreStep) {
        float* of_rows = scores + e * kRowTile + row;
        if constexpr (Pairs) {
            const auto* k = reinterpret_cast<const std::int32_t*>(scratch.k) + e;
            for (int block = 0; block < layout.k_blocks; ++block) {
                const int pair = block * kQuantBlock / 2;
                score_pairs<Vectors>(
                    scratch.query + pair * kRowTile + row, k + pair * kPromptEntries,
                    smaller(kQuantBlock / 2, layout.k_stride / 2 - pair),
                    scratch.k_scales + block * kPromptEntries + e, block == 0, of_rows);
            }
        } else {
            score_block<Vectors>(task.query + row, scratch.k + e, layout.k_stride, of_rows);
        }
    }
}

// Rounds the rows of a tile of queries to 16-bit integers, each relative to its largest value.
inline void round_queries(const PromptTask& task, const PromptScratch& scratch) {
    const int stride = task.entries.layout->k_stride;
    for (int row = 0; row < kRowTile; row += kLanes) {
        Vec limit = zero();
        Vec check = zero();  // becomes NaN if any value is not a number
        for (int d = 0; d < stride; ++d) {
            const Vec q = load(task.query + d * kRowTile + row);
            limit = maximum(limit, maximum(q, zero() - q));
            check = multiply_add(q, zero(), check);
        }
        const Vec counts = where_less(broadcast(1e-30f), limit, broadcast(1.0f), zero());
        const Vec inverse = broadcast(kLargestShort) / maximum(limit, broadcast(1e-30f)) * counts;
        store(scratch.units + row, multiply_add(limit, broadcast(1.0f / kLargestShort), check));
        for (int d = 0; d < stride; d += 2) {
            const float* q = task.query + d * kRowTile + row;
            store_ints(scratch.query + d / 2 * kRowTile + row,
                       pairs_of(round_to_int(load(q) * inverse),
                                round_to_int(load(q + kRowTile) * inverse)));
        }
    }
}

// Runs once for all tiles of a task.
template <KvType Type>
inline void prepare_queries(const PromptTask& task, const PromptScratch& scratch) {
    if constexpr (kInPairs<Type>) {
        round_queries(task, scratch);
    } else {
        for (int row = 0; row < kRowTile; row += kLanes)
            store(scratch.units + row, broadcast(1.0f));
    }
}

// Returns the position of entry e of a tile, relative to the micro-batch.
inline float position_of(const PromptTask& task, const PromptTile& tile, int e) {
    const std::int32_t position = tile.groups[e / kGroupEntries].positions[e % kGroupEntries];
    return static_cast<float>(position - task.base_position);
}

// Calls change(entry, row, score as a logit) for every vector of scores, and stores the result.
template <typename Change>
inline void change_scores(const PromptTask& task, const PromptTile& tile, const float* units,
                          float* scores, Change change) {
    for (int e = tile.skipped; e < tile.count; ++e) {
        for (int row = 0; row < task.rows; row += kLanes) {
            float* at = scores + e * kRowTile + row;
            store(at, change(e, row, load(at) * load(units + row)));
        }
    }
}

inline void mask_scores(const PromptTask& task, const PromptTile& tile, float* scores) {
    const Vec masked = broadcast(kMaskedLogit);
    for (int e = tile.skipped; e < tile.count; ++e) {
        const Vec position = broadcast(position_of(task, tile, e));
        for (int row = 0; row < task.rows; row += kLanes) {
            Vec score = load(scores + e * kRowTile + row);
            score = where_less(load(task.row_positions + row), position, masked, score);
            score = where_less(position, load(task.row_oldest + row), masked, score);
            store(scores + e * kRowTile + row, score);
        }
    }
}

// Applies soft-cap and ALiBi, which need logits: afterwards the scores are logits.
inline void adjust_scores(const PromptTask& task, const PromptTile& tile,
                          const PromptScratch& scratch, float* scores) {
    if (task.softcap > 0.0f)
        change_scores(task, tile, scratch.units, scores,
                      [&](int, int, Vec logit) { return soft_cap(logit, task.softcap); });
    const bool capped = task.softcap > 0.0f;
    float ones[kRowTile];
    for (float& one : ones) one = 1.0f;
    if (task.row_slopes == nullptr) return;
    change_scores(task, tile, capped ? ones : scratch.units, scores,
                  [&](int e, int row, Vec logit) {
                      const Vec distance =
                          broadcast(position_of(task, tile, e)) - load(task.row_positions + row);
                      return multiply_add(load(task.row_slopes + row), distance, logit);
                  });
}

inline bool are_logits(const PromptTask& task) {
    return task.softcap > 0.0f || task.row_slopes != nullptr;
}

// Computes the scores of a tile's entries, [entry][kRowTile]: the logit of each row, in the units
// of the row.
template <KvType Type>
inline void tile_scores(const PromptTask& task, const PromptTile& tile,
                        const PromptScratch& scratch, float* scores) {
    const int first = tile.skipped / kScoreStep * kScoreStep;
    if constexpr (kInPairs<Type>) {
        convert_k_pairs(tile, *task.entries.layout, reinterpret_cast<std::int32_t*>(scratch.k));
        convert_k_scales(tile, *task.entries.layout, scratch.k_scales);
    } else {
        convert_k<Type>(tile, *task.entries.layout, scratch.k);
    }
    over_rows(
        task.rows,
        [&](int row) {
            score_rows<kRowVectors, kInPairs<Type>>(task, scratch, row, first, tile.count, scores);
        },
        [&](int row) {
            score_rows<1, kInPairs<Type>>(task, scratch, row, first, tile.count, scores);
        });
    adjust_scores(task, tile, scratch, scores);
    if (task.masked) mask_scores(task, tile, scores);
}

// Returns what a score of 1 is as a logit, for these rows.
inline Vec unit_of(const PromptTask& task, const PromptScratch& scratch, int row) {
    return are_logits(task) ? broadcast(1.0f) : load(scratch.units + row);
}

}  // namespace
}  // namespace entropykv
