// Part of kernels.cpp: computes q.k and p.v of the decode kernel on pages of f16.
#pragma once

#include "kernels/kernel_decode.hpp"

namespace entropykv {
namespace {

// Computes the logits of `Vectors` vectors of entries, from vector `first` of the tile on.
template <int Rows, int Vectors>
ENTROPYKV_NOINLINE void score_half(const DecodeTile& tile, int first, const PageLayout& layout,
                                   const float* query, Stream* stream, float* logits) {
    const std::uint16_t* k[Vectors];
    for (int i = 0; i < Vectors; ++i)
        k[i] = reinterpret_cast<const std::uint16_t*>(tile.groups[(first + i) / kGroupVectors].k) +
               (first + i) % kGroupVectors * kLanes;
    Vec sums[Rows][Vectors];
    repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE { sums[r][i] = zero(); });
    });
    for (int d = 0; d < layout.k_dim; ++d) {
        if (stream != nullptr) stream->ask<Vectors * kLanes * 2>(d);
        Vec q[Rows];
        repeat<Rows>([&](auto r)
                         ENTROPYKV_INLINE { q[r] = broadcast(query[r * layout.k_stride + d]); });
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
            const Vec value = load_half(k[i] + d * kGroupEntries);
            repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
                sums[r][i] = multiply_add(value, q[r], sums[r][i]);
            });
        });
    }
    repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
            store(logits + r * kDecodeTile + (first + i) * kLanes, sums[r][i]);
        });
    });
}

// Computes output[Rows][..] = output * factor + the sum over entries of weight * v, for Vectors
// vectors from d on.
template <int Rows, int Vectors>
ENTROPYKV_NOINLINE void add_half_values(const DecodeTile& tile, Stream* stream,
                                        const PageLayout& layout, int d, int row,
                                        const DecodeScratch& scratch, float* output) {
    const int stride = layout.v_stride;
    Vec sums[Rows][Vectors];
    repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
        const Vec factor = broadcast(scratch.factors[row + r]);
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
            sums[r][i] = load(output + r * stride + d + i * kLanes) * factor;
        });
    });
    for (int g = 0; g < tile.n_groups; ++g) {
        const auto* v = reinterpret_cast<const std::uint16_t*>(tile.groups[g].v) + d;
        const float* weights = scratch.logits + row * kDecodeTile + g * kGroupEntries;
        const int n = smaller(kGroupEntries, tile.count - g * kGroupEntries);
        for (int e = 0; e < n; ++e) {
            if (stream != nullptr) stream->ask<Vectors * kLanes * 2>(e);
            Vec w[Rows];
            repeat<Rows>([&](auto r)
                             ENTROPYKV_INLINE { w[r] = broadcast(weights[r * kDecodeTile + e]); });
            repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
                const Vec value = load_half(v + e * stride + i * kLanes);
                repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
                    sums[r][i] = multiply_add(value, w[r], sums[r][i]);
                });
            });
        }
    }
    repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
            store(output + r * stride + d + i * kLanes, sums[r][i]);
        });
    });
}

// Adds up weighted values for `vectors` vectors of them, at most `Most`.
template <int Rows, int Most>
inline void add_some_half_values(int vectors, const DecodeTile& tile, Stream* stream,
                                 const PageLayout& layout, int d, int row,
                                 const DecodeScratch& scratch, float* output) {
    if constexpr (Most > 1) {
        if (vectors < Most)
            return add_some_half_values<Rows, Most - 1>(vectors, tile, stream, layout, d, row,
                                                        scratch, output);
    }
    add_half_values<Rows, Most>(tile, stream, layout, d, row, scratch, output);
}

constexpr int kHalfGroups = 8;  // this tile and the next one fit into the second cache

void decode_f16(const DecodeTask& task) {
    const PageLayout& layout = *task.entries.layout;
    DecodeScratch scratch;
    const auto scores = [&](const DecodeTile& tile, Stream& stream) {
        over_row_blocks(task.rows, [&](int row, auto rows) {
            constexpr int most = power_of_vectors(rows(), 8);
            over_entry_vectors<most>(tile.n_groups, [&](int first, auto vectors) {
                score_half<rows(), vectors()>(
                    tile, first, layout, task.query + row * layout.k_stride,
                    row == 0 ? &stream : nullptr, scratch.logits + row * kDecodeTile);
            });
        });
    };
    const auto values = [&](const DecodeTile& tile, Stream& stream) {
        over_row_blocks(task.rows, [&](int row, auto rows) {
            constexpr int most = smaller(8, kAccumulators / rows());
            const int n = layout.v_stride / kLanes;
            const int passes = (n + most - 1) / most;
            const int vectors = (n + passes - 1) / passes;
            for (int i = 0; i < n; i += vectors)
                add_some_half_values<rows(), most>(
                    smaller(vectors, n - i), tile, row == 0 ? &stream : nullptr, layout, i * kLanes,
                    row, scratch, task.state.output + row * layout.v_stride);
        });
    };
    decode_tiles<kHalfGroups>(task, scratch, scores, values);
}

}  // namespace
}  // namespace entropykv
