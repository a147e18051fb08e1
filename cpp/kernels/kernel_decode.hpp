// Part of kernels.cpp: computes attention of a few query rows that see the same entries, tile by
// tile: q.k of all entries of a tile, softmax, p.v. K and V are read from memory once, and
// prefetched a tile ahead. What all KV types need comes first, then q.k and p.v of f16, then
// those of q8_0 and iq4_nl.
#pragma once

#include "kernels/kernel_tile.hpp"

namespace entropykv {
namespace {

constexpr int kDecodeRows = 16;    // most query rows of a task
constexpr int kDecodeGroups = 16;  // most groups of a tile
constexpr int kDecodeTile = kDecodeGroups * kGroupEntries;
constexpr int kGroupVectors = kGroupEntries / kLanes;
constexpr int kSoftmaxStep = 64;  // logits of a row that are computed at a time, to overlap
using DecodeTile = Tile<kDecodeGroups>;

// Holds what every KV type needs in one call of the decode kernel.
struct DecodeScratch {
    DecodeTile tiles[2];  // this tile, and the next one for prefetching
    alignas(64) float logits[kDecodeRows * kDecodeTile];  // logits, then weights
    alignas(64) float sums[kDecodeRows * kLanes];         // sums of the softmax, by lane
    alignas(64) float weighted[kDecodeRows * kLanes];     // sums for the entropy, by lane, in bits
    alignas(64) float max[kDecodeRows];
    alignas(64) float tile_max[kDecodeRows];
    alignas(64) float shifts[kDecodeRows];    // change of the maximum by this tile, in bits
    alignas(64) float factors[kDecodeRows];   // factors by which earlier sums are multiplied
    alignas(64) float heaviest[kDecodeRows];  // largest weight of this tile
};

// Returns the largest power of two, at most `most`, of vectors whose sums for `rows` rows fit into
// registers.
constexpr int power_of_vectors(int rows, int most) {
    int vectors = 1;
    while (vectors * 2 <= most && vectors * 2 * rows <= kAccumulators) vectors *= 2;
    return vectors;
}

// Calls step(row, number of rows) for blocks of up to kDecodeBlock rows. The number is known at
// compile time.
template <int Rows = kDecodeBlock, typename Step>
inline void over_row_blocks(int rows, Step step, int row = 0) {
    for (; row + Rows <= rows; row += Rows) step(row, std::integral_constant<int, Rows>());
    if constexpr (Rows > 1) over_row_blocks<Rows - 1>(rows, step, row);
}

// Calls step(first vector, number of vectors) for all vectors of a tile: `Vectors` at a time, and
// at its end groups or parts of groups. The number is known at compile time.
template <int Vectors, typename Step>
inline void over_entry_vectors(int n_groups, Step step) {
    constexpr int tail = Vectors < kGroupVectors ? Vectors : kGroupVectors;
    const int n = n_groups * kGroupVectors;
    int first = 0;
    for (; first + Vectors <= n; first += Vectors)
        step(first, std::integral_constant<int, Vectors>());
    for (; first < n; first += tail) step(first, std::integral_constant<int, tail>());
}

// Prefetches the next tile while this one is computed: its groups from front to back, as many bytes
// as are consumed meanwhile. The prefetcher of the hardware can follow one ascending stream of
// misses, but not several groups side by side, nor rows that end with the page.
class Stream {
public:
    void start(const DecodeTile& tile, const PageLayout& layout) {
        group_ = tile.groups;
        last_ = tile.groups + tile.n_groups;
        k_bytes_ = layout.k_group_bytes() + scale_bytes(layout.k_blocks);
        v_bytes_ = layout.v_group_bytes() + scale_bytes(layout.v_blocks);
        at_ = end_ = nullptr;
        in_v_ = false;
    }

    // Prefetches about as many bytes as step `step` of a computation consumes, `Bytes`.
    template <int Bytes>
    void ask(int step) {
        if constexpr (Bytes >= kLine) {
            for (int i = 0; i < Bytes / kLine; ++i) ask_line();
        } else {
            if (step % (kLine / Bytes) == 0) ask_line();
        }
    }

private:
    static constexpr int kLine = 64;
    static std::size_t scale_bytes(int blocks) {
        return PageLayout::index(blocks * kGroupEntries) * sizeof(std::uint16_t);
    }

    void ask_line() {
        if (at_ >= end_ && !next_array()) return;
        prefetch(at_);
        at_ += kLine;
    }

    bool next_array() {
        if (group_ == last_) return false;
        at_ = in_v_ ? group_->v : group_->k;
        end_ = at_ + (in_v_ ? v_bytes_ : k_bytes_);
        if (in_v_) ++group_;
        in_v_ = !in_v_;
        return true;
    }

    const Group* group_ = nullptr;
    const Group* last_ = nullptr;
    const std::byte* at_ = nullptr;
    const std::byte* end_ = nullptr;
    std::size_t k_bytes_ = 0;
    std::size_t v_bytes_ = 0;
    bool in_v_ = false;
};

inline int softmax_entries(const DecodeTile& tile) {
    return (tile.count + kSoftmaxStep - 1) / kSoftmaxStep * kSoftmaxStep;
}

// Calls step(e) for every vector of the entries [0, n).
template <typename Step>
inline void over_logits(int n, Step step) {
    for (int e = 0; e < n; e += kSoftmaxStep)
        for (int i = 0; i < kSoftmaxStep; i += kLanes) step(e + i);
}

// Returns how far a vector of entries is from the token of the task (negative). `at`: their
// positions.
inline Vec distance_to(const DecodeTask& task, const std::int32_t* at) {
    return to_float(load_ints(at) + broadcast_int(-task.position));
}

// Applies soft-cap and ALiBi to the logits of row `number` in a tile, and masks entries that the
// row does not see or that are not part of the tile.
inline void finish_logits(const DecodeTask& task, const DecodeTile& tile, int number, float* row) {
    if (task.softcap > 0.0f)
        for (int e = 0; e < tile.n_groups * kGroupEntries; e += kLanes)
            store(row + e, soft_cap(load(row + e), task.softcap));
    if (task.slopes != nullptr) {
        const Vec slope = broadcast(task.slopes[number]);
        for (int e = 0; e < tile.n_groups * kGroupEntries; e += kLanes) {
            const std::int32_t* at = tile.groups[e / kGroupEntries].positions + e % kGroupEntries;
            store(row + e, multiply_add(slope, distance_to(task, at), load(row + e)));
        }
    }
    if (task.oldest > kMaskedLogit) {
        const Vec oldest = broadcast(task.oldest);
        for (int e = 0; e < tile.n_groups * kGroupEntries; e += kLanes) {
            const std::int32_t* at = tile.groups[e / kGroupEntries].positions + e % kGroupEntries;
            const Vec logit = load(row + e);
            store(row + e,
                  where_less(distance_to(task, at), oldest, broadcast(kMaskedLogit), logit));
        }
    }
    for (int e = 0; e < tile.skipped; ++e) row[e] = kMaskedLogit;
    for (int e = tile.count; e < softmax_entries(tile); ++e) row[e] = kMaskedLogit;
}

// Updates the maxima of the rows by those of this tile, and computes the factors that rescale
// earlier sums.
inline void update_maxima(int rows, DecodeScratch& scratch) {
    const Vec to_bits = broadcast(kLog2E);
    for (int r = 0; r < rows; r += kLanes) {
        const Vec old = load(scratch.max + r);
        const Vec best = load(scratch.tile_max + r);
        const Vec next = maximum(old, best);
        const Vec shift = maximum((old - next) * to_bits, broadcast(kVanishing));
        store(scratch.max + r, next);
        store(scratch.shifts + r, shift);
        store(scratch.factors + r, power_of_two(shift));
        store(scratch.heaviest + r, power_of_two((best - next) * to_bits));
    }
}

// Replaces the logits of one row by e^(l - max), and adds these to the rescaled sums.
inline void row_softmax(int row, int n, DecodeScratch& scratch) {
    float* logits = scratch.logits + row * kDecodeTile;
    const Vec factor = broadcast(scratch.factors[row]);
    Vec sums = load(scratch.sums + row * kLanes);
    Vec weighted = load(scratch.weighted + row * kLanes);
    weighted = factor * multiply_add(sums, broadcast(scratch.shifts[row]), weighted);
    sums = sums * factor;
    // If a row has seen nothing yet, masked entries must not get the weight 2^0.
    const Vec max = maximum(broadcast(scratch.max[row]), broadcast(0.5f * kMaskedLogit));
    over_logits(n, [&](int e) ENTROPYKV_INLINE {
        const Vec bits =
            maximum((load(logits + e) - max) * broadcast(kLog2E), broadcast(kVanishing));
        const Vec weight = power_of_two(bits);
        sums = sums + weight;
        weighted = multiply_add(weight, bits, weighted);
        store(logits + e, weight);
    });
    store(scratch.sums + row * kLanes, sums);
    store(scratch.weighted + row * kLanes, weighted);
}

inline void decode_softmax(const DecodeTask& task, const DecodeTile& tile, int first,
                           DecodeScratch& scratch) {
    const int n = softmax_entries(tile);
    for (int r = 0; r < task.rows; ++r) {
        float* row = scratch.logits + r * kDecodeTile;
        finish_logits(task, tile, r, row);
        if (task.logits != nullptr)
            std::memcpy(task.logits + static_cast<std::size_t>(r) * task.logits_stride +
                            (first - task.entries.first),
                        row + tile.skipped,
                        static_cast<std::size_t>(tile.count - tile.skipped) * sizeof(float));
        Vec best = load(row);
        over_logits(n, [&](int e) ENTROPYKV_INLINE { best = maximum(best, load(row + e)); });
        scratch.tile_max[r] = largest(best);
    }
    update_maxima(task.rows, scratch);
    for (int r = 0; r < task.rows; ++r) row_softmax(r, n, scratch);
}

inline void start_decode(const DecodeTask& task, DecodeScratch& scratch) {
    for (int r = 0; r < kDecodeRows; ++r) {
        scratch.max[r] = r < task.rows ? task.state.max[r] : kMaskedLogit;
        scratch.tile_max[r] = kMaskedLogit;
    }
    for (int r = 0; r < task.rows; ++r) {
        store(scratch.sums + r * kLanes, zero());
        store(scratch.weighted + r * kLanes, zero());
        scratch.sums[r * kLanes] = task.state.sum[r];
        scratch.weighted[r * kLanes] = task.state.weighted[r] * kLog2E;
    }
}

inline void end_decode(const DecodeTask& task, const DecodeScratch& scratch) {
    for (int r = 0; r < task.rows; ++r) {
        task.state.max[r] = scratch.max[r];
        task.state.sum[r] = sum(load(scratch.sums + r * kLanes));
        task.state.weighted[r] = sum(load(scratch.weighted + r * kLanes)) / kLog2E;
    }
}

// Runs the kernel on tiles of `Groups` groups. `Scores` computes the logits of a tile, `Values`
// adds its values to the output.
template <int Groups, typename Scores, typename Values>
inline void decode_tiles(const DecodeTask& task, DecodeScratch& scratch, Scores scores,
                         Values values) {
    start_decode(task, scratch);
    int first = task.entries.first;
    const auto open_at = [](const EntryRange& range, int entry, DecodeTile& tile) {
        open_tile(range, entry, Groups * kGroupEntries - entry % kGroupEntries, tile);
    };
    open_at(task.entries, first, scratch.tiles[0]);
    Stream stream;
    for (int current = 0; first < task.entries.last; current = 1 - current) {
        const DecodeTile& tile = scratch.tiles[current];
        const int next = first + tile.count - tile.skipped;
        open_at(task.entries, next, scratch.tiles[1 - current]);
        const bool last = next >= task.entries.last && task.upcoming.layout != nullptr;
        if (last) open_at(task.upcoming, task.upcoming.first, scratch.tiles[1 - current]);
        stream.start(scratch.tiles[1 - current], *task.entries.layout);
        scores(tile, stream);
        decode_softmax(task, tile, first, scratch);
        values(tile, stream);
        first = next;
    }
    end_decode(task, scratch);
}

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

// Calls add_half_values() for `vectors` vectors, at most `Most`.
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

constexpr int kHalfGroups = 8;  // this tile and the next one fit into the second-level cache

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

// The following functions compute q.k and p.v on pages whose K is q8_0, and whose V is q8_0 or
// iq4_nl, by products of pairs of integers. The query and the weights are rounded to 16-bit
// integers with one scale per block of values. The error of that is a few hundredths of the error
// of K and V, which have 8 bits at most.

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
        best = maximum(best, maximum(scale, zero() - scale));  // scales of iq4_nl may be negative
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
