// Part of kernels.cpp: attention of many query rows, each with its own position. The rows are in
// the lanes, so that softmax needs no sums across lanes.
// The weights of a tile of entries are relative to the largest logit of the tile, rounded up to a
// power of two, so that they do not depend on what was read before.
#pragma once

#include "kernels/kernel_prompt_values.hpp"

namespace entropykv {
namespace {

// Replaces the scores of a vector of rows by e^(logit - max).
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
