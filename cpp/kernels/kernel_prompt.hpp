// Part of kernels.cpp: computes attention of many query rows, each with its own position. The rows
// are in the lanes, so that softmax needs no sums across lanes.
// The weights of a tile of entries are relative to the largest logit of the tile, rounded up to a
// power of two, so that they do not depend on what was read before.
// If the CPU computes products of pairs of 16-bit integers faster than those of floats, q8_0 and
// iq4_nl are multiplied as integers: K and V are widened to 16 bits, and the query and the
// weights are rounded to 16 bits. That error is small, since K and V have at most 8 bits.
// Everything else is computed in f32.
#pragma once

#include <type_traits>

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
    // Holds [kPromptEntries][v_stride], or pairs of V; unused or pairs if V is a part of K.
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

// Calls wide(first row) for every kRowVectors vectors of rows, and narrow(first row) for each
// vector that is left.
template <typename Wide, typename Narrow>
inline void over_rows(int rows, Wide wide, Narrow narrow) {
    int row = 0;
    for (; row + kRowVectors * kLanes <= rows; row += kRowVectors * kLanes) wide(row);
    for (; row < rows; row += kLanes) narrow(row);
}

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

// Returns what a score of 1 is as a logit, for the vector of rows from `row` on.
inline Vec unit_of(const PromptTask& task, const PromptScratch& scratch, int row) {
    return are_logits(task) ? broadcast(1.0f) : load(scratch.units + row);
}

constexpr int kValueStep = 4;  // values of V at a time

// Returns where value d of entry e of a tile lies: V is [entries][v_stride], and V that is a part
// of K is as convert_k() makes it.
template <bool Latent>
inline int value_place(int stride, int e, int d) {
    return Latent ? d * kPromptEntries + e : e * stride + d;
}

// Computes output[kValueStep][kRowTile] = output * factor + share * the sum over entries of
// v[entry][0..4) * weights[entry].
template <int Vectors, bool Latent>
inline void value_block(const float* weights, const float* v, int stride, int count,
                        const float* factors, const float* shares, float* output) {
    Vec sums[kValueStep][Vectors];
    for (int d = 0; d < kValueStep; ++d)
        for (int i = 0; i < Vectors; ++i) sums[d][i] = zero();
    for (int e = 0; e < count; ++e) {
        Vec w[Vectors];
        for (int i = 0; i < Vectors; ++i) w[i] = load(weights + e * kRowTile + i * kLanes);
        for (int d = 0; d < kValueStep; ++d) {
            const Vec value = broadcast(v[value_place<Latent>(stride, e, d)]);
            for (int i = 0; i < Vectors; ++i) sums[d][i] = multiply_add(value, w[i], sums[d][i]);
        }
    }
    for (int d = 0; d < kValueStep; ++d) {
        for (int i = 0; i < Vectors; ++i) {
            float* at = output + d * kRowTile + i * kLanes;
            const Vec before = load(at) * load(factors + i * kLanes);
            store(at, multiply_add(sums[d][i], load(shares + i * kLanes), before));
        }
    }
}

// Adds up weighted values in integers, for n pairs of entries.
template <int Vectors, bool Latent>
ENTROPYKV_NOINLINE void value_pairs(const std::int32_t* weights, const std::int32_t* v, int stride,
                                    int n, const float* factors, const float* parts,
                                    float* output) {
    IntVec sums[kValueStep][Vectors];
    repeat<kValueStep>([&](auto d) ENTROPYKV_INLINE {
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE { sums[d][i] = broadcast_int(0); });
    });
    for (int pair = 0; pair < n; ++pair) {
        IntVec w[Vectors];
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
            w[i] = load_ints(weights + pair * kRowTile + i * kLanes);
        });
        repeat<kValueStep>([&](auto d) ENTROPYKV_INLINE {
            const IntVec value = broadcast_int(v[pair_place<Latent>(stride, pair, d)]);
            repeat<Vectors>(
                [&](auto i) ENTROPYKV_INLINE { sums[d][i] = dot_pairs(sums[d][i], value, w[i]); });
        });
    }
    repeat<kValueStep>([&](auto d) ENTROPYKV_INLINE {
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
            float* at = output + d * kRowTile + i * kLanes;
            const Vec before = load(at) * load(factors + i * kLanes);
            store(at, multiply_add(to_float(sums[d][i]), load(parts + i * kLanes), before));
        });
    });
}

// Converts the scales of one block of V of all entries in a tile to integers, relative to the
// largest one; those behind the last entry become 0. Returns the value of an integer of 1.
inline float part_scales(const PromptTile& tile, const PageLayout& layout, int block, float* out) {
    const int n = tile.n_groups * kGroupEntries;
    for (int e = 0; e < n; e += kLanes) {
        const Group& group = tile.groups[e / kGroupEntries];
        const std::uint16_t* scales = layout.latent ? group.k_scales : group.v_scales;
        store(out + e, load_half(scales + block * kGroupEntries + e % kGroupEntries));
    }
    for (int e = 0; e < tile.skipped; ++e) out[e] = 0.0f;
    for (int e = tile.count; e < n; ++e) out[e] = 0.0f;
    Vec best = zero();
    for (int e = 0; e < n; e += kLanes)  // scales of iq4_nl may be negative
        best = maximum(best, maximum(load(out + e), zero() - load(out + e)));
    const float limit = largest(best);
    const Vec part = broadcast(limit > 0.0f ? kLargestShort / limit : 0.0f);
    for (int e = 0; e < n; e += kLanes) store(out + e, load(out + e) * part);
    return limit / kLargestShort;
}

// Multiplies the weights of Vectors * kLanes rows by the scales of a block, and rounds them to
// integers.
template <int Vectors>
inline void round_weights(const PromptTile& tile, const float* weights, const float* scales,
                          std::int32_t* out) {
    for (int e = tile.skipped & ~1; e < tile.count; e += 2) {
        const Vec low = broadcast(scales[e]);
        const Vec high = broadcast(scales[e + 1]);
        const float* of_rows = weights + e * kRowTile;
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
            store_ints(out + e / 2 * kRowTile + i * kLanes,
                       pairs_of(round_to_int(load(of_rows + i * kLanes) * low),
                                round_to_int(load(of_rows + kRowTile + i * kLanes) * high)));
        });
    }
}

template <bool Latent>
inline void tile_values_f32(const PromptTask& task, const PromptTile& tile,
                            const PromptScratch& scratch, const float* weights, const float* v) {
    const int stride = task.entries.layout->v_stride;
    const int first = tile.skipped;
    for (int d = 0; d < stride; d += kValueStep) {
        const float* values = v + value_place<Latent>(stride, first, d);
        const auto block = [&](auto vectors, int row) {
            value_block<decltype(vectors)::value, Latent>(
                weights + first * kRowTile + row, values, stride, tile.count - first,
                scratch.factors + row, scratch.shares + row,
                task.state.output + d * kRowTile + row);
        };
        over_rows(
            task.rows, [&](int row) { block(std::integral_constant<int, kRowVectors>(), row); },
            [&](int row) { block(std::integral_constant<int, 1>(), row); });
    }
}

template <bool Latent>
inline void tile_values_pairs(const PromptTask& task, const PromptTile& tile,
                              const PromptScratch& scratch, const float* weights) {
    const PageLayout& layout = *task.entries.layout;
    const int first = tile.skipped / 2;
    const int n = (tile.count + 1) / 2 - first;
    const auto* v = reinterpret_cast<const std::int32_t*>(scratch.v);
    for (int d = 0; d < layout.v_stride; d += kValueStep) {
        if (d % kQuantBlock == 0) {
            const float part = part_scales(tile, layout, d / kQuantBlock, scratch.v_scales);
            over_rows(
                task.rows,
                [&](int row) {
                    round_weights<kRowVectors>(tile, weights + row, scratch.v_scales,
                                               scratch.weights + row);
                },
                [&](int row) {
                    round_weights<1>(tile, weights + row, scratch.v_scales, scratch.weights + row);
                });
            for (int row = 0; row < task.rows; row += kLanes)
                store(scratch.parts + row, load(scratch.shares + row) * broadcast(part));
        }
        const auto block = [&](auto vectors, int row) {
            value_pairs<decltype(vectors)::value, Latent>(
                scratch.weights + first * kRowTile + row,
                v + pair_place<Latent>(layout.v_stride, first, d), layout.v_stride, n,
                scratch.factors + row, scratch.parts + row, task.state.output + d * kRowTile + row);
        };
        over_rows(
            task.rows, [&](int row) { block(std::integral_constant<int, kRowVectors>(), row); },
            [&](int row) { block(std::integral_constant<int, 1>(), row); });
    }
}

template <KvType Type>
inline void tile_values(const PromptTask& task, const PromptTile& tile,
                        const PromptScratch& scratch, const float* weights) {
    const PageLayout& layout = *task.entries.layout;
    if constexpr (kInPairs<Type>) {
        convert_v_pairs<Type>(tile, layout, reinterpret_cast<std::int32_t*>(scratch.v));
        if (layout.latent) {
            tile_values_pairs<true>(task, tile, scratch, weights);
        } else {
            tile_values_pairs<false>(task, tile, scratch, weights);
        }
    } else if (layout.latent) {
        tile_values_f32<true>(task, tile, scratch, weights, scratch.k);
    } else {
        convert_v<Type>(tile, layout, scratch.v);
        tile_values_f32<false>(task, tile, scratch, weights, scratch.v);
    }
}

// Replaces the scores of a vector of rows by e^(logit - max), and computes max and the sums.
template <bool Masked, bool Entropy>
inline void weigh_rows(const PromptTask& task, const PromptTile& tile, const PromptScratch& scratch,
                       const KeptTile& kept, int row) {
    constexpr int kChains = 4;  // independent maxima, which do not wait for each other
    const Vec unit = unit_of(task, scratch, row) * broadcast(kLog2E);
    float* rows = kept.rows + row;
    Vec best[kChains];
    for (Vec& of_chain : best) of_chain = load(rows + tile.skipped * kRowTile);
    for (int e = tile.skipped; e < tile.count; e += kChains)
        for (int i = 0; i < kChains; ++i)
            best[i] = maximum(load(rows + smaller(e + i, tile.count - 1) * kRowTile), best[i]);
    const Vec largest_score = maximum(maximum(best[0], best[1]), maximum(best[2], best[3]));
    const Vec floor = broadcast(0.5f * kMaskedLogit);
    Vec max = round_nearest(multiply_add(largest_score, unit, broadcast(0.5f)));
    // Floats above 2^24 cannot represent every integer, so the rounded maximum may be too small.
    // The offset is then limited to 0, because no weight may exceed 1.
    Vec offset = multiply_add(largest_score, unit, zero() - max);
    offset = where_less(zero(), offset, zero(), offset);
    if constexpr (Masked) max = where_less(largest_score, floor, broadcast(kMaskedLogit), max);
    Vec total = zero();
    Vec weighted = zero();
    for (int e = tile.skipped; e < tile.count; ++e) {
        float* at = rows + e * kRowTile;
        const Vec score = load(at);
        const Vec bits = multiply_add(score - largest_score, unit, offset);
        Vec weight = power_of_two(bits);
        if constexpr (Masked) weight = where_less(score, floor, zero(), weight);
        total = total + weight;
        if constexpr (Entropy)
            weighted = multiply_add(weight, maximum(bits, broadcast(-150.0f)), weighted);
        store(at, weight);
    }
    store(kept.max + row, max);
    store(scratch.sums + row, total);
    store(scratch.weighted + row, weighted);
}

template <bool Masked>
inline void weigh_tile(const PromptTask& task, const PromptTile& tile, const PromptScratch& scratch,
                       const KeptTile& kept) {
    for (int row = 0; row < task.rows; row += kLanes) {
        if (task.entropy) {
            weigh_rows<Masked, true>(task, tile, scratch, kept, row);
        } else {
            weigh_rows<Masked, false>(task, tile, scratch, kept, row);
        }
    }
}

template <KvType Type>
inline void tile_weights(const PromptTask& task, const PromptTile& tile,
                         const PromptScratch& scratch, const KeptTile& kept) {
    tile_scores<Type>(task, tile, scratch, kept.rows);
    if (task.masked) {
        weigh_tile<true>(task, tile, scratch, kept);
    } else {
        weigh_tile<false>(task, tile, scratch, kept);
    }
}

// Adds a tile to the softmax of a vector of rows, and computes by which factor the earlier sums are
// multiplied and how much the tile counts.
inline void add_tile(const PromptTask& task, const PromptScratch& scratch, const KeptTile& kept,
                     int row) {
    const SoftmaxState& state = task.state;
    const Vec old_max = load(state.max + row);
    const Vec tile_max = load(kept.max + row);
    const Vec max = maximum(old_max, tile_max);
    const Vec before = old_max - max;
    const Vec behind = tile_max - max;
    const Vec factor = power_of_two(before);
    const Vec share = power_of_two(behind);
    const Vec old_sum = load(state.sum + row);
    const Vec sum = load(scratch.sums + row);
    if (task.entropy) {
        const Vec nats = broadcast(kNatsPerBit);
        const Vec least = broadcast(-200.0f);
        const Vec old_weighted =
            multiply_add(old_sum, maximum(before, least) * nats, load(state.weighted + row));
        const Vec more = multiply_add(sum, maximum(behind, least), load(scratch.weighted + row));
        store(state.weighted + row, multiply_add(old_weighted, factor, more * nats * share));
    }
    store(state.sum + row, multiply_add(old_sum, factor, sum * share));
    store(state.max + row, max);
    store(scratch.factors + row, factor);
    store(scratch.shares + row, share);
}

template <KvType Type>
void prompt_typed(const PromptTask& task) {
    const PromptScratch scratch = split_scratch(task);
    prepare_queries<Type>(task, scratch);
    PromptTile tile;
    float* next = task.kept;
    for (int first = task.entries.first; first < task.entries.last; first += kEntryTile) {
        open_tile(task.entries, first, kEntryTile, tile);
        const KeptTile kept = kept_at(next != nullptr ? next : scratch.kept, tile);
        if (next != nullptr) next = kept.next;
        tile_weights<Type>(task, tile, scratch, kept);
        for (int row = 0; row < task.rows; row += kLanes) add_tile(task, scratch, kept, row);
        tile_values<Type>(task, tile, scratch, kept.rows);
    }
}

void prompt(const PromptTask& task) {
    with_type(task.entries.layout->type,
              [&](auto known) { prompt_typed<decltype(known)::type>(task); });
}

}  // namespace
}  // namespace entropykv
