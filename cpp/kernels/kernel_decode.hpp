// Part of kernels.cpp: attention of a few query rows that see the same entries, tile by tile: q.k
// of all entries of a tile, softmax, p.v. Every byte of K and V is read once, and prefetched half a
// tile ahead.
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

// Holds what both KV types need in one call of the decode kernel.
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

// Returns the largest power of two of vectors whose sums for `rows` rows fit into registers.
constexpr int power_of_vectors(int rows, int most) {
    int vectors = 1;
    while (vectors * 2 <= most && vectors * 2 * rows <= kAccumulators) vectors *= 2;
    return vectors;
}

// Calls step<Rows>(row) for blocks of up to kDecodeBlock rows.
template <int Rows = kDecodeBlock, typename Step>
inline void over_row_blocks(int rows, Step step, int row = 0) {
    for (; row + Rows <= rows; row += Rows) step(row, std::integral_constant<int, Rows>());
    if constexpr (Rows > 1) over_row_blocks<Rows - 1>(rows, step, row);
}

// Calls step<Vectors>(first vector) for the vectors of a tile, in groups or parts of groups.
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

    // Notes that step `step` consumes `Bytes` bytes.
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

// Finishes the logits of one row in a tile, and masks entries that the row does not see or that are
// not part of the tile.
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

// Updates the maxima of the rows with this tile, and by how much earlier sums are rescaled.
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

// Replaces the logits of one row by e^(l - max), computed with powers of two.
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

}  // namespace
}  // namespace entropykv
