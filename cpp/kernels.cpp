// Attention over pages. CMake compiles this file once per instruction set; simd.hpp picks the
// vector type from the compiler's flags. Two kernels: `decode` puts the values of a row in the
// lanes (few query rows, every byte of K and V read once); `prompt` puts query rows in the lanes,
// so that softmax needs no sums across lanes and K and V are used as they are stored.
#include "kernels.hpp"

#include <type_traits>

#include "simd.hpp"

namespace entropykv {
namespace {

constexpr int kDecodeRows = 16;  // rows per call of the decode kernel's tile
constexpr int kMaxBlocks = 32;   // scales per row: head sizes up to 1024

template <typename T>
inline T smaller(T a, T b) {
    return a < b ? a : b;
}

// Pointers to the rows of up to kEntryTile entries.
struct Tile {
    int count;
    const std::byte* k[kEntryTile];
    const std::byte* v[kEntryTile];
    const std::uint16_t* k_scales[kEntryTile];
    const std::uint16_t* v_scales[kEntryTile];
    const std::int32_t* positions[kEntryTile];
};

inline void open_tile(const EntryRange& range, int first, Tile& tile) {
    const PageLayout& layout = *range.layout;
    tile.count = range.last > first ? smaller(kEntryTile, range.last - first) : 0;
    int page_index = first / layout.entries;
    int slot = first % layout.entries;
    const std::size_t value = layout.type == KvType::q8_0 ? 1 : 2;
    const std::size_t k_bytes = value * static_cast<std::size_t>(layout.k_stride);
    const std::size_t v_bytes = value * static_cast<std::size_t>(layout.v_stride);
    for (int e = 0; e < tile.count;) {
        const std::byte* page = range.pages[page_index++];
        for (; slot < layout.entries && e < tile.count; ++slot, ++e) {
            const auto n = static_cast<std::size_t>(slot);
            tile.k[e] = page + layout.k_offset + n * k_bytes;
            tile.v[e] = page + layout.v_offset + n * v_bytes;
            tile.k_scales[e] =
                reinterpret_cast<const std::uint16_t*>(page + layout.k_scale_offset) +
                slot * layout.k_blocks;
            tile.v_scales[e] =
                reinterpret_cast<const std::uint16_t*>(page + layout.v_scale_offset) +
                slot * layout.v_blocks;
            tile.positions[e] = layout.positions(page) + slot;
        }
        slot = 0;
    }
}

// Scales of a tile's rows as f32.
inline void convert_scales(const std::uint16_t* const* scales, int count, int blocks, float* out) {
    for (int e = 0; e < count; ++e)
        for (int b = 0; b < blocks; ++b) out[e * blocks + b] = half_scale(scales[e] + b);
}

// Rows of a page lie apart from the next page's: the hardware's prefetcher loses them.
inline void prefetch_row(const std::byte* row, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

// Values [d, d + kLanes) of a row, as f32.
template <KvType Type>
inline Vec load_values(const std::byte* row, const float* scales, int d) {
    if constexpr (Type == KvType::f16) {
        return load_half(reinterpret_cast<const std::uint16_t*>(row) + d);
    } else {
        return load_int8(reinterpret_cast<const std::int8_t*>(row) + d) *
               broadcast(scales[d / kQuantBlock]);
    }
}

// ---------------------------------------------------------------------------------------------
// decode

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

// ---------------------------------------------------------------------------------------------
// prompt

// Converts `count` rows to f32, and pads with zero rows to a multiple of 4.
template <KvType Type>
inline void convert_rows(const std::byte* const* rows, const std::uint16_t* const* half_scales,
                         int blocks, int count, int stride, float* scales, float* out) {
    convert_scales(half_scales, count, blocks, scales);
    for (int e = 0; e < count; ++e)
        for (int d = 0; d < stride; d += kLanes)
            store(out + e * stride + d, load_values<Type>(rows[e], scales + e * blocks, d));
    for (int e = count; e % 4 != 0; ++e)
        for (int d = 0; d < stride; d += kLanes) store(out + e * stride + d, zero());
}

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
            const Vec value = broadcast(k[e * stride + d]);
            for (int i = 0; i < Vectors; ++i) sums[e][i] = multiply_add(value, q[i], sums[e][i]);
        }
    }
    for (int e = 0; e < 4; ++e)
        for (int i = 0; i < Vectors; ++i) store(logits + e * kRowTile + i * kLanes, sums[e][i]);
}

// output[4][kRowTile] = output * factor + sum over entries of v[entry][0..4) * weights[entry].
template <int Vectors>
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
            const Vec value = broadcast(v[e * stride + d]);
            for (int i = 0; i < Vectors; ++i) sums[d][i] = multiply_add(value, w[i], sums[d][i]);
        }
    }
    for (int d = 0; d < 4; ++d)
        for (int i = 0; i < Vectors; ++i) store(output + d * kRowTile + i * kLanes, sums[d][i]);
}

template <int Vectors>
inline void score_rows(const float* query, const float* k, int stride, int count, float* logits) {
    for (int e = 0; e < count; e += 4)
        score_block<Vectors>(query, k + e * stride, stride, logits + e * kRowTile);
}

template <int Vectors>
inline void value_rows(const float* weights, const float* v, int stride, int count,
                       const float* factors, float* output) {
    for (int d = 0; d < stride; d += 4)
        value_block<Vectors>(weights, v + d, stride, count, factors, output + d * kRowTile);
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

inline void mask_scores(const PromptTask& task, const Tile& tile, float* logits) {
    const Vec masked = broadcast(kMaskedLogit);
    const float window = task.window > 0.0f ? task.window : 1e9f;
    for (int e = 0; e < tile.count; ++e) {
        const Vec position = broadcast(static_cast<float>(*tile.positions[e]));
        const Vec expiry = position + broadcast(window - 0.5f);
        for (int row = 0; row < task.rows; row += kLanes) {
            const Vec own = load(task.row_positions + row);
            Vec logit = load(logits + e * kRowTile + row);
            logit = where_less(own, position, masked, logit);
            store(logits + e * kRowTile + row, where_less(expiry, own, masked, logit));
        }
    }
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

inline void tile_values(const PromptTask& task, const float* weights, const float* v, int count,
                        const float* factors) {
    const int stride = task.entries.layout->v_stride;
    float* output = task.state.output;
    over_rows(
        task.rows,
        [&](int row) {
            value_rows<kRowVectors>(weights + row, v, stride, count, factors + row, output + row);
        },
        [&](int row) {
            value_rows<1>(weights + row, v, stride, count, factors + row, output + row);
        });
}

struct PromptScratch {
    float* k;        // [kEntryTile][k_stride]
    float* v;        // [kEntryTile][v_stride]
    float* logits;   // [kEntryTile][kRowTile]
    float* factors;  // [kRowTile]
    float* shifts;   // [kRowTile]
    float* scales;   // [kEntryTile][blocks]
};

inline PromptScratch split_scratch(const PromptTask& task) {
    const PageLayout& layout = *task.entries.layout;
    PromptScratch scratch;
    scratch.k = task.scratch;
    scratch.v = scratch.k + kEntryTile * layout.k_stride;
    scratch.logits = scratch.v + kEntryTile * layout.v_stride;
    scratch.factors = scratch.logits + kEntryTile * kRowTile;
    scratch.shifts = scratch.factors + kRowTile;
    scratch.scales = scratch.shifts + kRowTile;
    return scratch;
}

template <KvType Type>
void prompt_typed(const PromptTask& task) {
    const PageLayout& layout = *task.entries.layout;
    const PromptScratch scratch = split_scratch(task);
    Tile tile;
    for (int first = task.entries.first; first < task.entries.last; first += kEntryTile) {
        open_tile(task.entries, first, tile);
        convert_rows<Type>(tile.k, tile.k_scales, layout.k_blocks, tile.count, layout.k_stride,
                           scratch.scales, scratch.k);
        convert_rows<Type>(tile.v, tile.v_scales, layout.v_blocks, tile.count, layout.v_stride,
                           scratch.scales, scratch.v);
        tile_scores(task, scratch.k, tile.count, scratch.logits);
        if (task.masked) mask_scores(task, tile, scratch.logits);
        for (int row = 0; row < task.rows; row += kLanes)
            store(scratch.factors + row, rows_softmax(task.state, row, tile.count, scratch.logits));
        tile_values(task, scratch.logits, scratch.v, tile.count, scratch.factors);
    }
}

template <KvType Type>
void prompt_mass_typed(const PromptTask& task, int first_row, float* mass) {
    const PageLayout& layout = *task.entries.layout;
    const PromptScratch scratch = split_scratch(task);
    const Vec floor = broadcast(0.5f * kMaskedLogit);
    // Rows beyond task.rows only fill the last vector: they must not count.
    for (int row = 0; row < kRowTile; ++row) {
        const bool counts = row >= first_row && row < task.rows;
        scratch.factors[row] = counts ? 1.0f / task.state.sum[row] : 0.0f;
        scratch.shifts[row] = counts ? task.state.max[row] : -kMaskedLogit;
    }
    Tile tile;
    for (int first = task.entries.first; first < task.entries.last; first += kEntryTile) {
        open_tile(task.entries, first, tile);
        convert_rows<Type>(tile.k, tile.k_scales, layout.k_blocks, tile.count, layout.k_stride,
                           scratch.scales, scratch.k);
        tile_scores(task, scratch.k, tile.count, scratch.logits);
        if (task.masked) mask_scores(task, tile, scratch.logits);
        for (int e = 0; e < tile.count; ++e) {
            Vec sums = zero();
            for (int row = 0; row < task.rows; row += kLanes) {
                const Vec logit = load(scratch.logits + e * kRowTile + row);
                const Vec weight = where_less(logit, floor, zero(),
                                              exponential(logit - load(scratch.shifts + row)));
                sums = multiply_add(weight, load(scratch.factors + row), sums);
            }
            mass[first - task.entries.first + e] += sum(sums);
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

void prompt_mass(const PromptTask& task, int first_row, float* mass) {
    if (task.entries.layout->type == KvType::f16) {
        prompt_mass_typed<KvType::f16>(task, first_row, mass);
    } else {
        prompt_mass_typed<KvType::q8_0>(task, first_row, mass);
    }
}

void logits_mass(const float* logits, int n, float max, float total, float* mass) {
    const Vec shift = broadcast(max);
    const Vec scale = broadcast(1.0f / total);
    int j = 0;
    for (; j + kLanes <= n; j += kLanes) {
        const Vec weight = exponential(load(logits + j) - shift);
        store(mass + j, multiply_add(weight, scale, load(mass + j)));
    }
    if (j == n) return;
    float rest[kLanes];
    for (int i = 0; i < kLanes; ++i) rest[i] = j + i < n ? logits[j + i] : kMaskedLogit;
    store(rest, exponential(load(rest) - shift) * scale);
    for (int i = 0; j + i < n; ++i) mass[j + i] += rest[i];
}

// ---------------------------------------------------------------------------------------------
// storing

inline void store_half_row(const float* row, int dim, int stride, std::uint16_t* out) {
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) store_half(out + d, load(row + d));
    for (; d < stride; ++d) out[d] = d < dim ? float_to_half(row[d]) : std::uint16_t{0};
}

// ggml's q8_0: scale = largest magnitude / 127 (stored as f16), values rounded to nearest.
inline void store_int8_row(const float* row, int dim, int stride, std::int8_t* out,
                           std::uint16_t* scales) {
    for (int block = 0; block * kQuantBlock < stride; ++block) {
        const int first = block * kQuantBlock;
        const int last = smaller(first + kQuantBlock, stride);
        float limit = 0.0f;
        for (int d = first; d < smaller(last, dim); ++d) {
            const float magnitude = row[d] < 0.0f ? -row[d] : row[d];
            limit = magnitude > limit ? magnitude : limit;
        }
        const std::uint16_t half = float_to_half(limit / 127.0f);
        const float scale = half_to_float(half);
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        scales[block] = half;
        for (int d = first; d < last; ++d) {
            float value = d < dim ? row[d] * inverse : 0.0f;
            value = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
            out[d] =
                static_cast<std::int8_t>(static_cast<int>(value + (value < 0.0f ? -0.5f : 0.5f)));
        }
    }
}

inline void store_row(const PageLayout& layout, std::byte* page, int slot, std::size_t offset,
                      std::size_t scale_offset, int dim, int stride, int blocks, const float* row) {
    const std::size_t start = static_cast<std::size_t>(slot) * static_cast<std::size_t>(stride);
    if (layout.type == KvType::f16) {
        store_half_row(row, dim, stride, reinterpret_cast<std::uint16_t*>(page + offset) + start);
    } else {
        store_int8_row(row, dim, stride, reinterpret_cast<std::int8_t*>(page + offset) + start,
                       reinterpret_cast<std::uint16_t*>(page + scale_offset) + slot * blocks);
    }
}

void store_k(const PageLayout& layout, std::byte* page, int slot, const float* row) {
    store_row(layout, page, slot, layout.k_offset, layout.k_scale_offset, layout.k_dim,
              layout.k_stride, layout.k_blocks, row);
}

void store_v(const PageLayout& layout, std::byte* page, int slot, const float* row) {
    store_row(layout, page, slot, layout.v_offset, layout.v_scale_offset, layout.v_dim,
              layout.v_stride, layout.v_blocks, row);
}

}  // namespace

#if defined(__AVX512F__)
const KernelTable kKernelsAvx512{"avx512", store_k,     store_v,    decode,
                                 prompt,   prompt_mass, logits_mass};
#elif defined(__AVX2__)
const KernelTable kKernelsAvx2{"avx2", store_k, store_v, decode, prompt, prompt_mass, logits_mass};
#else
const KernelTable kKernelsPortable{"portable", store_k,     store_v,    decode,
                                   prompt,     prompt_mass, logits_mass};
#endif

}  // namespace entropykv
