// Part of kernels.cpp: computes p.v of a tile of entries for many query rows, which are in the
// lanes.
#pragma once

#include <type_traits>

#include "kernels/kernel_prompt_scores.hpp"

namespace entropykv {
namespace {

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
    for (int e = 0; e < n; e += kLanes)  // scales of iq4_nl have signs
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

// Adds a tile to the output.
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

}  // namespace
}  // namespace entropykv
