// Part of kernels.cpp: computes q.k and p.v of the decode kernel on pages whose K is q8_0, and
// whose V is q8_0 or iq4_nl, by products of pairs of integers. The query and the weights are
// rounded to 16-bit integers with one scale per block of values. The error of that is a few
// hundredths of the error of K and V, which have 8 bits.
#pragma once

#include "kernels/kernel_decode.hpp"

namespace entropykv {
namespace {

constexpr int kBlockVectors = kQuantBlock / kLanes;

struct QuantScratch : DecodeScratch {
    alignas(64) std::int16_t query[kDecodeRows * kMaxHeadDim];  // [rows][k_stride]
    float query_scales[kDecodeRows * kMaxBlocks];               // [rows][k_blocks]
    // Corrects the 128 that is added to bytes of K.
    std::int32_t query_starts[kDecodeRows * kMaxBlocks];
    alignas(64) float v_scales[kDecodeTile];
    alignas(64) std::int16_t weights[kDecodeRows * kDecodeTile];
    float units[kDecodeRows];  // value of an integer weight of 1
};

inline void quantise_query(const DecodeTask& task, QuantScratch& scratch) {
    const PageLayout& layout = *task.entries.layout;
    for (int r = 0; r < task.rows; ++r) {
        for (int block = 0; block < layout.k_blocks; ++block) {
            const int first = r * layout.k_stride + block * kQuantBlock;
            const int n = smaller(kQuantBlock, layout.k_stride - block * kQuantBlock);
            Vec best = zero();
            for (int d = first; d < first + n; d += kLanes) {
                const Vec q = load(task.query + d);
                best = maximum(best, maximum(q, zero() - q));
            }
            const float limit = largest(best);
            const Vec inverse = broadcast(limit > 1e-30f ? kLargestShort / limit : 0.0f);
            Vec sums = zero();
            for (int d = first; d < first + n; d += kLanes) {
                const IntVec q = round_to_int(load(task.query + d) * inverse);
                store_shorts(scratch.query + d, q);
                sums = sums + to_float(q);
            }
            const int at = r * layout.k_blocks + block;
            scratch.query_scales[at] = limit / kLargestShort;
            scratch.query_starts[at] = -128 * static_cast<std::int32_t>(sum(sums));
        }
    }
}

// Adds the products with one block of K to the logits of `Vectors` vectors of entries.
template <int Rows, int Vectors>
ENTROPYKV_NOINLINE void score_block_int8(const DecodeTile& tile, int first,
                                         const PageLayout& layout, int block, int row,
                                         Stream* stream, QuantScratch& scratch) {
    const std::byte* k[Vectors];
    for (int i = 0; i < Vectors; ++i)
        k[i] =
            tile.groups[(first + i) / kGroupVectors].k + (first + i) % kGroupVectors * kLanes * 4;
    IntVec sums[Rows][Vectors];
    repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
        const std::int32_t at_zero = scratch.query_starts[(row + r) * layout.k_blocks + block];
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE { sums[r][i] = broadcast_int(at_zero); });
    });
    const int start = block * kQuantBlock;
    const std::int16_t* query = scratch.query + row * layout.k_stride;
    for (int d = start; d < smaller(start + kQuantBlock, layout.k_stride); d += 4) {
        if (stream != nullptr) stream->ask<Vectors * kLanes * 4>(d / 4);
        repeat<2>([&](auto odd) ENTROPYKV_INLINE {
            IntVec q[Rows];
            repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
                q[r] = broadcast_pair(query + r * layout.k_stride + d + 2 * odd);
            });
            repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
                const IntVec bytes = load_ints(k[i] + d * kGroupEntries);
                const IntVec pairs = odd ? odd_unsigned_bytes(bytes) : even_unsigned_bytes(bytes);
                repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
                    sums[r][i] = dot_pairs(sums[r][i], pairs, q[r]);
                });
            });
        });
    }
    repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
        const Vec k_scale = load_half(tile.groups[(first + i) / kGroupVectors].k_scales +
                                      block * kGroupEntries + (first + i) % kGroupVectors * kLanes);
        repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
            float* logits = scratch.logits + (row + r) * kDecodeTile + (first + i) * kLanes;
            const float q_scale = scratch.query_scales[(row + r) * layout.k_blocks + block];
            const Vec before = block == 0 ? zero() : load(logits);
            store(logits, multiply_add(to_float(sums[r][i]), k_scale * broadcast(q_scale), before));
        });
    });
}

// Multiplies the weights of all rows by the scales of one block of V, and rounds them to integers
// relative to the heaviest weight of the tile and the largest scale.
inline void quantise_weights(const DecodeTask& task, const DecodeTile& tile, int block,
                             QuantScratch& scratch) {
    for (int e = 0; e < tile.n_groups * kGroupEntries; e += kLanes)
        store(scratch.v_scales + e, load_half(tile.groups[e / kGroupEntries].v_scales +
                                              block * kGroupEntries + e % kGroupEntries));
    const int n = softmax_entries(tile);
    for (int e = tile.count; e < n; ++e) scratch.v_scales[e] = 0.0f;
    Vec best = zero();
    over_logits(n, [&](int e) ENTROPYKV_INLINE {
        const Vec scale = load(scratch.v_scales + e);
        best = maximum(best, maximum(scale, zero() - scale));  // those of iq4_nl have signs
    });
    const float limit = largest(best);
    for (int r = 0; r < task.rows; ++r) {
        // A tile contributes nothing if its weights are below 1e-30 of the earlier ones, or if its
        // V is zero.
        const float heaviest = scratch.heaviest[r];
        const bool counts = heaviest > 1e-30f && limit > 0.0f;
        scratch.units[r] = counts ? heaviest * limit / kLargestShort : 0.0f;
        const Vec to_part = broadcast(counts ? 1.0f / limit : 0.0f);
        const Vec inverse = broadcast(counts ? kLargestShort / heaviest : 0.0f);
        const float* weights = scratch.logits + r * kDecodeTile;
        std::int16_t* integers = scratch.weights + r * kDecodeTile;
        over_logits(n, [&](int e) ENTROPYKV_INLINE {
            const Vec part = load(scratch.v_scales + e) * to_part;
            store_shorts(integers + e, round_to_int(load(weights + e) * inverse * part));
        });
    }
}

// Computes output[Rows][..] = output * factor + the sum over entries of weight * v, for Vectors
// vectors of a block from d on.
template <KvType Type, int Rows, int Vectors>
ENTROPYKV_NOINLINE void add_byte_values(const DecodeTile& tile, Stream* stream,
                                        const PageLayout& layout, int d, int row,
                                        const QuantScratch& scratch, float* output) {
    constexpr int chains = Rows * Vectors <= 4 ? 2 : 1;  // hides the latency of dot_pairs
    const int stride = layout.v_stride;
    const int rows_bytes = four_rows<Type>(layout);
    IntVec sums[Rows][Vectors][chains];
    repeat<Rows * Vectors * chains>([&](auto i) ENTROPYKV_INLINE {
        sums[i / chains / Vectors][i / chains % Vectors][i % chains] = broadcast_int(0);
    });
    for (int g = 0; g < tile.n_groups; ++g) {
        const std::byte* v = tile.groups[g].v;
        const std::int16_t* weights = scratch.weights + row * kDecodeTile + g * kGroupEntries;
        for (int e = 0; e < kGroupEntries; e += 4, v += rows_bytes) {
            if (stream != nullptr) stream->ask<Vectors * kLanes * kValueBits<Type> / 2>(e / 4);
            repeat<2>([&](auto odd) ENTROPYKV_INLINE {
                IntVec w[Rows];
                repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
                    w[r] = broadcast_pair(weights + r * kDecodeTile + e + 2 * odd);
                });
                repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
                    const IntVec bytes = load_value_bytes<Type>(v, d + i * kLanes);
                    const IntVec pairs = odd ? odd_bytes(bytes) : even_bytes(bytes);
                    repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
                        IntVec& sum = sums[r][i][odd % chains];
                        sum = dot_pairs(sum, pairs, w[r]);
                    });
                });
            });
        }
    }
    repeat<Rows>([&](auto r) ENTROPYKV_INLINE {
        const Vec unit = broadcast(scratch.units[row + r]);
        const Vec factor = broadcast(scratch.factors[row + r]);
        repeat<Vectors>([&](auto i) ENTROPYKV_INLINE {
            float* out = output + r * stride + d + i * kLanes;
            IntVec total = sums[r][i][0];
            if constexpr (chains == 2) total = total + sums[r][i][1];
            store(out, multiply_add(to_float(total), unit, load(out) * factor));
        });
    });
}

template <KvType Type, int Rows>
inline void add_byte_block(const DecodeTile& tile, Stream* stream, const PageLayout& layout,
                           int block, int row, const QuantScratch& scratch, float* output) {
    constexpr int most = power_of_vectors(Rows, kBlockVectors);
    constexpr int fewer = smaller(most, kBlockVectors / 2);  // the last block may have 16 values
    const int end = smaller((block + 1) * kQuantBlock, layout.v_stride);
    int d = block * kQuantBlock;
    for (; d + most * kLanes <= end; d += most * kLanes)
        add_byte_values<Type, Rows, most>(tile, stream, layout, d, row, scratch, output);
    for (; d < end; d += fewer * kLanes)
        add_byte_values<Type, Rows, fewer>(tile, stream, layout, d, row, scratch, output);
}

template <KvType Type>
void decode_bytes(const DecodeTask& task) {
    const PageLayout& layout = *task.entries.layout;
    QuantScratch scratch;
    quantise_query(task, scratch);
    const auto scores = [&](const DecodeTile& tile, Stream& stream) {
        over_row_blocks(task.rows, [&](int row, auto rows) {
            constexpr int most = power_of_vectors(rows(), 4);
            over_entry_vectors<most>(tile.n_groups, [&](int first, auto vectors) {
                for (int block = 0; block < layout.k_blocks; ++block)
                    score_block_int8<rows(), vectors()>(tile, first, layout, block, row,
                                                        row == 0 ? &stream : nullptr, scratch);
            });
        });
    };
    const auto values = [&](const DecodeTile& tile, Stream& stream) {
        for (int block = 0; block < layout.v_blocks; ++block) {
            quantise_weights(task, tile, block, scratch);
            over_row_blocks(task.rows, [&](int row, auto rows) {
                add_byte_block<Type, rows()>(tile, row == 0 ? &stream : nullptr, layout, block, row,
                                             scratch, task.state.output + row * layout.v_stride);
            });
        }
    };
    decode_tiles<kDecodeGroups>(task, scratch, scores, values);
}

}  // namespace
}  // namespace entropykv
