// Part of kernels.cpp: few query rows that see the same entries. The values of a row are in the
// lanes, so that every byte of K and V is read once.
#pragma once

#include <type_traits>

#include "kernel_tile.hpp"

namespace entropykv {
namespace {

constexpr int kDecodeRows = 16;  // query rows of one task at most

// Scratch of one call of the decode kernel.
struct DecodeScratch {
    Tile tiles[2];  // this one, and the next one for prefetching
    alignas(64) float logits[kDecodeRows * kEntryTile];
    alignas(64) float k_scales[kEntryTile * kMaxBlocks];
    alignas(64) float v_scales[kEntryTile * kMaxBlocks];
    float factors[kDecodeRows];
};

// Logits of 4 entries for `Rows` query rows.
template <KvType Type, int Rows>
inline void dot4(const std::byte* const* k, const float* scales, int blocks, const float* query,
                 int stride, float* logits) {
    Vec sums[Rows][4];
    for (int r = 0; r < Rows; ++r)
        for (int e = 0; e < 4; ++e) sums[r][e] = zero();
    for (int d = 0; d < stride; d += kLanes) {
        Vec values[4];
        for (int e = 0; e < 4; ++e) values[e] = load_values<Type>(k[e], scales + e * blocks, d);
        for (int r = 0; r < Rows; ++r) {
            const Vec q = load(query + r * stride + d);
            for (int e = 0; e < 4; ++e) sums[r][e] = multiply_add(q, values[e], sums[r][e]);
        }
    }
    for (int r = 0; r < Rows; ++r)
        sum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], logits + r * kEntryTile);
}

// Logits of a tile for rows [row, row + Rows); prefetches the tile's V meanwhile.
template <KvType Type, int Rows>
inline void tile_logits(const DecodeTask& task, const Tile& tile, int row, DecodeScratch& scratch) {
    const PageLayout& layout = *task.entries.layout;
    const int v_bytes = layout.v_stride * (Type == KvType::q8_0 ? 1 : 2);
    const float* query = task.query + row * layout.k_stride;
    float* logits = scratch.logits + row * kEntryTile;
    int e = 0;
    for (; e + 4 <= tile.count; e += 4) {
        if (row == 0)
            for (int i = 0; i < 4; ++i) prefetch_row(tile.v[e + i], v_bytes);
        dot4<Type, Rows>(tile.k + e, scratch.k_scales + e * layout.k_blocks, layout.k_blocks, query,
                         layout.k_stride, logits + e);
    }
    if (e == tile.count) return;
    const std::byte* rest[4];
    for (int i = 0; i < 4; ++i) rest[i] = tile.k[smaller(e + i, tile.count - 1)];
    dot4<Type, Rows>(rest, scratch.k_scales + e * layout.k_blocks, layout.k_blocks, query,
                     layout.k_stride, logits + e);
}

inline void finish_logits(const DecodeTask& task, const Tile& tile, float* row) {
    if (task.softcap > 0.0f)
        for (int e = 0; e < tile.count; e += kLanes)
            store(row + e, soft_cap(load(row + e), task.softcap));
    if (task.oldest_position > kMaskedLogit)
        for (int e = 0; e < tile.count; ++e)
            if (static_cast<float>(*tile.positions[e]) < task.oldest_position)
                row[e] = kMaskedLogit;
    for (int e = tile.count; e < kEntryTile; ++e) row[e] = kMaskedLogit;
}

// Replaces the logits of one row by e^(l - max); returns the factor of what was summed before.
inline float tile_softmax(float* row, float& max, float& total, float& weighted) {
    Vec best = load(row);
    for (int e = kLanes; e < kEntryTile; e += kLanes) best = maximum(best, load(row + e));
    const float tile_max = largest(best);
    float factor = 1.0f;
    if (tile_max > max) {
        float shifted[kLanes];
        store(shifted, exponential(broadcast(max - tile_max)));
        factor = shifted[0];
        weighted = factor == 0.0f ? 0.0f : factor * (weighted + total * (max - tile_max));
        total *= factor;
        max = tile_max;
    }
    const Vec shift = broadcast(max);
    const Vec floor = broadcast(0.5f * kMaskedLogit);
    Vec sums = zero();
    Vec weighted_sums = zero();
    for (int e = 0; e < kEntryTile; e += kLanes) {
        const Vec logit = load(row + e);
        const Vec difference = logit - shift;
        const Vec weight = where_less(logit, floor, zero(), exponential(difference));
        sums = sums + weight;
        weighted_sums =
            multiply_add(weight, maximum(difference, broadcast(-100.0f)), weighted_sums);
        store(row + e, weight);
    }
    total += sum(sums);
    weighted += sum(weighted_sums);
    return factor;
}

// output[Rows][..] = output * factor + sum over entries of weight * v, for Vectors vectors from d
// on; prefetches the next tile's K meanwhile.
template <KvType Type, int Rows, int Vectors>
inline void add_values(const Tile& tile, const Tile& next, int next_bytes, const PageLayout& layout,
                       int d, int row, DecodeScratch& scratch, float* output) {
    const int stride = layout.v_stride;
    const float* weights = scratch.logits + row * kEntryTile;
    Vec sums[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
        for (int i = 0; i < Vectors; ++i)
            sums[r][i] =
                load(output + r * stride + d + i * kLanes) * broadcast(scratch.factors[row + r]);
    for (int e = 0; e < tile.count; ++e) {
        if (e < next.count) prefetch_row(next.k[e], next_bytes);
        Vec v[Vectors];
        for (int i = 0; i < Vectors; ++i)
            v[i] = load_values<Type>(tile.v[e], scratch.v_scales + e * layout.v_blocks,
                                     d + i * kLanes);
        for (int r = 0; r < Rows; ++r) {
            const Vec w = broadcast(weights[r * kEntryTile + e]);
            for (int i = 0; i < Vectors; ++i) sums[r][i] = multiply_add(w, v[i], sums[r][i]);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int i = 0; i < Vectors; ++i) store(output + r * stride + d + i * kLanes, sums[r][i]);
}

template <KvType Type, int Rows>
inline void decode_rows(const DecodeTask& task, const Tile& tile, const Tile& next, int row,
                        DecodeScratch& scratch) {
    constexpr int vectors = kRowVectors;
    const PageLayout& layout = *task.entries.layout;
    const int k_bytes = layout.k_stride * (Type == KvType::q8_0 ? 1 : 2);
    float* output = task.state.output + row * layout.v_stride;
    for (int d = 0; d < layout.v_stride;) {
        const int next_bytes = row == 0 && d == 0 ? k_bytes : 0;
        if (d + vectors * kLanes <= layout.v_stride) {
            add_values<Type, Rows, vectors>(tile, next, next_bytes, layout, d, row, scratch,
                                            output);
            d += vectors * kLanes;
        } else {
            add_values<Type, Rows, 1>(tile, next, next_bytes, layout, d, row, scratch, output);
            d += kLanes;
        }
    }
}

// Calls step<Rows>(row) for blocks of up to 4 rows.
template <typename Step>
inline void over_row_blocks(int rows, Step step) {
    for (int row = 0; row < rows; row += 4) {
        switch (smaller(4, rows - row)) {
            case 1: step(row, std::integral_constant<int, 1>()); break;
            case 2: step(row, std::integral_constant<int, 2>()); break;
            case 3: step(row, std::integral_constant<int, 3>()); break;
            default: step(row, std::integral_constant<int, 4>());
        }
    }
}

inline void decode_softmax(const DecodeTask& task, const Tile& tile, int first,
                           DecodeScratch& scratch) {
    for (int r = 0; r < task.rows; ++r) {
        float* row = scratch.logits + r * kEntryTile;
        finish_logits(task, tile, row);
        if (task.logits != nullptr)
            std::memcpy(task.logits + static_cast<std::size_t>(r) * task.logits_stride +
                            (first - task.entries.first),
                        row, static_cast<std::size_t>(tile.count) * sizeof(float));
        scratch.factors[r] =
            tile_softmax(row, task.state.max[r], task.state.sum[r], task.state.weighted[r]);
    }
}

template <KvType Type>
void decode_typed(const DecodeTask& task) {
    const PageLayout& layout = *task.entries.layout;
    DecodeScratch scratch;
    open_tile(task.entries, task.entries.first, scratch.tiles[0]);
    for (int e = 0; e < scratch.tiles[0].count; ++e)
        prefetch_row(scratch.tiles[0].k[e], layout.k_stride * (Type == KvType::q8_0 ? 1 : 2));
    int current = 0;
    for (int first = task.entries.first; first < task.entries.last; first += kEntryTile) {
        const Tile& tile = scratch.tiles[current];
        Tile& next = scratch.tiles[1 - current];
        open_tile(task.entries, first + kEntryTile, next);
        convert_scales(tile.k_scales, tile.count, layout.k_blocks, scratch.k_scales);
        over_row_blocks(task.rows, [&](int row, auto rows) {
            tile_logits<Type, rows()>(task, tile, row, scratch);
        });
        decode_softmax(task, tile, first, scratch);
        convert_scales(tile.v_scales, tile.count, layout.v_blocks, scratch.v_scales);
        over_row_blocks(task.rows, [&](int row, auto rows) {
            decode_rows<Type, rows()>(task, tile, next, row, scratch);
        });
        current = 1 - current;
    }
}

void decode(const DecodeTask& task) {
    if (task.entries.layout->type == KvType::f16) {
        decode_typed<KvType::f16>(task);
    } else {
        decode_typed<KvType::q8_0>(task);
    }
}

}  // namespace
}  // namespace entropykv
