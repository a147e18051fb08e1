// Part of kernels.cpp: many query rows, each with its own position. Query rows are in the lanes, so
// that softmax needs no sums across lanes and K and V are used as they are stored.
#pragma once

#include "kernels/kernel_convert.hpp"

namespace entropykv {
namespace {

// logits[4][kRowTile] of 4 entries for Vectors * kLanes query rows.
template <int Vectors>
inline void score_block(const float* query, const float* k, int stride, float* logits) {
    Vec sums[4][Vectors];
    for (int e = 0; e < 4; ++e)
        for (int i = 0; i < Vectors; ++i) sums[e][i] = zero();
    for (int d = 0; d < stride; ++d) {
        Vec q[Vectors];
        for (int i = 0; i < Vectors; ++i) q[i] = load(query + d * kRowTile + i * kLanes);
        for (int e = 0; e < 4; ++e) {
            const Vec value = broadcast(k[d * kPromptEntries + e]);
            for (int i = 0; i < Vectors; ++i) sums[e][i] = multiply_add(value, q[i], sums[e][i]);
        }
    }
    for (int e = 0; e < 4; ++e)
        for (int i = 0; i < Vectors; ++i) store(logits + e * kRowTile + i * kLanes, sums[e][i]);
}

// Where value d of entry e of a tile lies: V as [entries][v_stride], or in K as convert_k() makes
// it.
template <bool Latent>
inline int value_place(int stride, int e, int d) {
    return Latent ? d * kPromptEntries + e : e * stride + d;
}

// output[4][kRowTile] = output * factor + sum over entries of v[entry][0..4) * weights[entry].
template <int Vectors, bool Latent>
inline void value_block(const float* weights, const float* v, int stride, int count,
                        const float* factors, float* output) {
    Vec sums[4][Vectors];
    for (int d = 0; d < 4; ++d)
        for (int i = 0; i < Vectors; ++i)
            sums[d][i] = load(output + d * kRowTile + i * kLanes) * load(factors + i * kLanes);
    for (int e = 0; e < count; ++e) {
        Vec w[Vectors];
        for (int i = 0; i < Vectors; ++i) w[i] = load(weights + e * kRowTile + i * kLanes);
        for (int d = 0; d < 4; ++d) {
            const Vec value = broadcast(v[value_place<Latent>(stride, e, d)]);
            for (int i = 0; i < Vectors; ++i) sums[d][i] = multiply_add(value, w[i], sums[d][i]);
        }
    }
    for (int d = 0; d < 4; ++d)
        for (int i = 0; i < Vectors; ++i) store(output + d * kRowTile + i * kLanes, sums[d][i]);
}

template <int Vectors>
inline void score_rows(const float* query, const float* k, int stride, int count, float* logits) {
    for (int e = 0; e < count; e += 4)
        score_block<Vectors>(query, k + e, stride, logits + e * kRowTile);
}

template <int Vectors, bool Latent>
inline void value_rows(const float* weights, const float* v, int stride, int count,
                       const float* factors, float* output) {
    for (int d = 0; d < stride; d += 4)
        value_block<Vectors, Latent>(weights, v + value_place<Latent>(stride, 0, d), stride, count,
                                     factors, output + d * kRowTile);
}

// Runs `step<Vectors>(first row)` over the row vectors that hold the task's rows.
template <typename Wide, typename Narrow>
inline void over_rows(int rows, Wide wide, Narrow narrow) {
    int row = 0;
    for (; row + kRowVectors * kLanes <= rows; row += kRowVectors * kLanes) wide(row);
    for (; row < rows; row += kLanes) narrow(row);
}

inline void tile_scores(const PromptTask& task, const float* k, int count, float* logits) {
    const int stride = task.entries.layout->k_stride;
    over_rows(
        task.rows,
        [&](int row) { score_rows<kRowVectors>(task.query + row, k, stride, count, logits + row); },
        [&](int row) { score_rows<1>(task.query + row, k, stride, count, logits + row); });
    if (task.softcap > 0.0f)
        for (int i = 0; i < count * kRowTile; i += kLanes)
            store(logits + i, soft_cap(load(logits + i), task.softcap));
}

// Of entry e of a tile, skipped ones not counted, relative to the micro-batch.
inline float position_of(const PromptTask& task, const PromptTile& tile, int e) {
    const int at = tile.skipped + e;
    const std::int32_t position = tile.groups[at / kGroupEntries].positions[at % kGroupEntries];
    return static_cast<float>(position - task.base_position);
}

inline void mask_scores(const PromptTask& task, const PromptTile& tile, int count, float* logits) {
    const Vec masked = broadcast(kMaskedLogit);
    for (int e = 0; e < count; ++e) {
        const Vec position = broadcast(position_of(task, tile, e));
        for (int row = 0; row < task.rows; row += kLanes) {
            Vec logit = load(logits + e * kRowTile + row);
            logit = where_less(load(task.row_positions + row), position, masked, logit);
            logit = where_less(position, load(task.row_oldest + row), masked, logit);
            store(logits + e * kRowTile + row, logit);
        }
    }
}

inline void bias_scores(const PromptTask& task, const PromptTile& tile, int count, float* logits) {
    for (int e = 0; e < count; ++e) {
        const Vec position = broadcast(position_of(task, tile, e));
        for (int row = 0; row < task.rows; row += kLanes) {
            float* at = logits + e * kRowTile + row;
            const Vec distance = position - load(task.row_positions + row);
            store(at, multiply_add(load(task.row_slopes + row), distance, load(at)));
        }
    }
}

// After tile_scores().
inline void finish_scores(const PromptTask& task, const PromptTile& tile, int count,
                          float* logits) {
    if (task.row_slopes != nullptr) bias_scores(task, tile, count, logits);
    if (task.masked) mask_scores(task, tile, count, logits);
}

// Online softmax of one vector of rows over the entries of a tile; returns the rescaling factor.
inline Vec rows_softmax(const SoftmaxState& state, int row, int count, float* logits) {
    const Vec old_max = load(state.max + row);
    Vec max = old_max;
    for (int e = 0; e < count; ++e) max = maximum(max, load(logits + e * kRowTile + row));
    Vec factor = broadcast(1.0f);
    Vec total = load(state.sum + row);
    Vec weighted = load(state.weighted + row);
    if (any_less(old_max, max)) {
        const Vec difference = maximum(old_max - max, broadcast(-200.0f));
        factor = exponential(difference);
        weighted = factor * multiply_add(total, difference, weighted);
        total = total * factor;
        store(state.max + row, max);
    }
    const Vec floor = broadcast(0.5f * kMaskedLogit);
    for (int e = 0; e < count; ++e) {
        float* at = logits + e * kRowTile + row;
        const Vec logit = load(at);
        const Vec difference = logit - max;
        const Vec weight = where_less(logit, floor, zero(), exponential(difference));
        total = total + weight;
        weighted = multiply_add(weight, maximum(difference, broadcast(-100.0f)), weighted);
        store(at, weight);
    }
    store(state.sum + row, total);
    store(state.weighted + row, weighted);
    return factor;
}

template <bool Latent>
inline void tile_values(const PromptTask& task, const float* weights, const float* v, int count,
                        const float* factors) {
    const int stride = task.entries.layout->v_stride;
    float* output = task.state.output;
    over_rows(
        task.rows,
        [&](int row) {
            value_rows<kRowVectors, Latent>(weights + row, v, stride, count, factors + row,
                                            output + row);
        },
        [&](int row) {
            value_rows<1, Latent>(weights + row, v, stride, count, factors + row, output + row);
        });
}

struct PromptScratch {
    float* k;        // [k_stride][kPromptEntries]
    float* v;        // [kPromptEntries][v_stride]; nothing where V is a part of K
    float* logits;   // [kEntryTile][kRowTile]
    float* factors;  // [kRowTile]
    float* shifts;   // [kRowTile]
};

inline PromptScratch split_scratch(const PromptTask& task) {
    const PageLayout& layout = *task.entries.layout;
    PromptScratch scratch;
    scratch.k = task.scratch;
    scratch.v = scratch.k + kPromptEntries * layout.k_stride;
    scratch.logits = scratch.v + (layout.latent ? 0 : kPromptEntries * layout.v_stride);
    scratch.factors = scratch.logits + kEntryTile * kRowTile;
    scratch.shifts = scratch.factors + kRowTile;
    return scratch;
}

template <KvType Type>
void prompt_typed(const PromptTask& task) {
    const PageLayout& layout = *task.entries.layout;
    const PromptScratch scratch = split_scratch(task);
    PromptTile tile;
    for (int first = task.entries.first; first < task.entries.last; first += kEntryTile) {
        open_tile(task.entries, first, kEntryTile, tile);
        const int count = tile.count - tile.skipped;
        const float* k = convert_k<Type>(tile, layout, scratch.k);
        tile_scores(task, k, count, scratch.logits);
        finish_scores(task, tile, count, scratch.logits);
        for (int row = 0; row < task.rows; row += kLanes)
            store(scratch.factors + row, rows_softmax(task.state, row, count, scratch.logits));
        if (layout.latent) {
            tile_values<true>(task, scratch.logits, k, count, scratch.factors);
        } else {
            tile_values<false>(task, scratch.logits, convert_v<Type>(tile, layout, scratch.v),
                               count, scratch.factors);
        }
    }
}

void prompt(const PromptTask& task) {
    if (task.entries.layout->type == KvType::f16) {
        prompt_typed<KvType::f16>(task);
    } else {
        prompt_typed<KvType::q8_0>(task);
    }
}

}  // namespace
}  // namespace entropykv
