// Part of kernels.cpp: stores rows of K and V in the slots of a page.
#pragma once

#include "kernels/kernel_tile.hpp"
#include "page/value_rotation.hpp"

namespace entropykv {
namespace {

// Converts a row to f16, padded with zeros to `stride` values.
inline void convert_half_row(const float* row, int dim, int stride, std::uint16_t* out) {
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) store_half(out + d, load(row + d));
    for (; d < stride; ++d) out[d] = d < dim ? float_to_half(row[d]) : std::uint16_t{0};
}

inline float largest_magnitude(const float* values, int n) {
    Vec limits = zero();
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) {
        const Vec x = load(values + d);
        limits = maximum(limits, maximum(x, zero() - x));
    }
    float limit = largest(limits);
    for (; d < n; ++d) {
        const float magnitude = values[d] < 0.0f ? -values[d] : values[d];
        limit = magnitude > limit ? magnitude : limit;
    }
    return limit;
}

// Quantises to ggml's q8_0: scale = largest magnitude / 127, stored as f16. Unlike in ggml, values
// are divided by the stored scale, and then rounded to the nearest integer.
inline void convert_int8_row(const float* row, int dim, int stride, std::int8_t* out,
                             std::uint16_t* scales) {
    for (int block = 0; block * kQuantBlock < stride; ++block) {
        const int first = block * kQuantBlock;
        const int last = smaller(first + kQuantBlock, stride);
        const float limit = largest_magnitude(row + first, smaller(last, dim) - first);
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

void rotate(float* row, int stride) {
    for (int d = 0; d < stride; d += kQuantBlock) rotate_block(row + d);
}

// Holds the places in kValueLevels of the levels that are nearest to values, and these levels.
struct NearestLevels {
    Vec places;
    Vec levels;
};

inline NearestLevels nearest_levels(Vec values) {
    NearestLevels nearest{zero(), broadcast(static_cast<float>(kValueLevels[0]))};
    repeat<kLevels - 1>([&](auto i) ENTROPYKV_INLINE {
        constexpr auto lower = static_cast<float>(kValueLevels[i]);
        constexpr auto upper = static_cast<float>(kValueLevels[i + 1]);
        const Vec middle = broadcast((lower + upper) / 2.0f);
        const Vec place = broadcast(static_cast<float>(i + 1));
        nearest.places = where_less(middle, values, place, nearest.places);
        nearest.levels = where_less(middle, values, broadcast(upper), nearest.levels);
    });
    return nearest;
}

// Returns the scale of a block in iq4_nl. At first, the value of the largest magnitude becomes the
// lowest level. Then the scale becomes the one with the least squared error for the levels that
// this gives. That is computed in integers, so that it does not depend on the order of sums.
inline float scale_of_levels(const float* values) {
    Vec highest = load(values);
    Vec lowest = zero() - load(values);
    for (int d = kLanes; d < kQuantBlock; d += kLanes) {
        highest = maximum(highest, load(values + d));
        lowest = maximum(lowest, zero() - load(values + d));
    }
    const float up = largest(highest);
    const float down = largest(lowest);
    const float limit = up < down ? down : up;
    if (limit <= 1e-30f) return 0.0f;
    const float first = (up < down ? -limit : limit) / static_cast<float>(kValueLevels[0]);
    const Vec inverse = broadcast(1.0f / first);
    const Vec to_short = broadcast(kLargestShort / limit);
    IntVec products = broadcast_int(0);
    IntVec squares = broadcast_int(0);
    for (int d = 0; d < kQuantBlock; d += 2 * kLanes) {
        const Vec low = load(values + d);
        const Vec high = load(values + d + kLanes);
        const IntVec shorts = pairs_of(round_to_int(low * to_short), round_to_int(high * to_short));
        const IntVec levels = pairs_of(round_to_int(nearest_levels(low * inverse).levels),
                                       round_to_int(nearest_levels(high * inverse).levels));
        products = dot_pairs(products, shorts, levels);
        squares = dot_pairs(squares, levels, levels);
    }
    const float ratio = static_cast<float>(sum(products)) / static_cast<float>(sum(squares));
    return limit / kLargestShort * ratio;
}

// Rounds a block to the nearest levels. Values i and i + 16 share byte i; bytes are `apart` bytes
// apart.
inline void round_to_levels(const float* values, float scale, std::uint8_t* codes, int apart) {
    constexpr int half = kQuantBlock / 2;
    const Vec inverse = broadcast(scale > 0.0f || scale < 0.0f ? 1.0f / scale : 0.0f);
    std::int32_t both[half];
    for (int i = 0; i < half; i += kLanes) {
        const Vec low = nearest_levels(load(values + i) * inverse).places;
        const Vec high = nearest_levels(load(values + i + half) * inverse).places;
        store_ints(both + i, round_to_int(low + high * broadcast(16.0f)));
    }
    for (int i = 0; i < half; ++i) codes[i * apart] = static_cast<std::uint8_t>(both[i]);
}

inline void store_scales(int blocks, const std::uint16_t* scales, int slot, std::byte* out) {
    for (int block = 0; block < blocks; ++block)
        reinterpret_cast<std::uint16_t*>(out)[PageLayout::scale_index(blocks, slot, block)] =
            scales[block];
}

inline void store_half_k(const PageLayout& layout, std::byte* page, int slot, const float* row) {
    std::uint16_t values[kMaxHeadDim];
    convert_half_row(row, layout.k_dim, layout.k_stride, values);
    auto* k = reinterpret_cast<std::uint16_t*>(page + layout.k_at(slot));
    for (int d = 0; d < layout.k_stride; ++d) k[d * kGroupEntries] = values[d];
}

inline void store_int8_k(const PageLayout& layout, std::byte* page, int slot, const float* row) {
    std::int8_t values[kMaxHeadDim];
    std::uint16_t scales[kMaxBlocks];
    convert_int8_row(row, layout.k_dim, layout.k_stride, values, scales);
    auto* k = reinterpret_cast<std::uint8_t*>(page + layout.k_at(slot));
    for (int d = 0; d < layout.k_stride; d += 4)
        for (int i = 0; i < 4; ++i)
            k[d * kGroupEntries + quad_place(i)] = static_cast<std::uint8_t>(values[d + i] ^ 0x80);
    store_scales(layout.k_blocks, scales, slot, page + layout.k_scale_offset);
}

inline void store_half_v(const PageLayout& layout, std::byte* page, int slot, const float* row) {
    convert_half_row(row, layout.v_dim, layout.v_stride,
                     reinterpret_cast<std::uint16_t*>(page + layout.v_at(slot)));
}

inline void store_int8_v(const PageLayout& layout, std::byte* page, int slot, const float* row) {
    std::int8_t values[kMaxHeadDim];
    std::uint16_t scales[kMaxBlocks];
    convert_int8_row(row, layout.v_dim, layout.v_stride, values, scales);
    auto* v = reinterpret_cast<std::int8_t*>(page + layout.v_at(slot));
    for (int d = 0; d < layout.v_stride; ++d) v[d * 4] = values[d];
    store_scales(layout.v_blocks, scales, slot, page + layout.v_scale_offset);
}

inline void store_int4_v(const PageLayout& layout, std::byte* page, int slot, const float* row) {
    float values[kMaxHeadDim];
    std::uint16_t scales[kMaxBlocks];
    constexpr float limit = 1e30f;  // Differences of infinities would not be numbers.
    for (int d = 0; d < layout.v_stride; ++d) {
        const float value = d < layout.v_dim ? row[d] : 0.0f;
        values[d] = value > limit ? limit : value < -limit ? -limit : value;
    }
    rotate(values, layout.v_stride);
    auto* codes = reinterpret_cast<std::uint8_t*>(page + layout.v_at(slot));
    for (int block = 0; block < layout.v_blocks; ++block) {
        const float* of_block = values + block * kQuantBlock;
        scales[block] = float_to_half(scale_of_levels(of_block));
        round_to_levels(of_block, half_to_float(scales[block]),
                        codes + block * (kQuantBlock / 2) * 4, 4);
    }
    store_scales(layout.v_blocks, scales, slot, page + layout.v_scale_offset);
}

void store_k(const PageLayout& layout, std::byte* page, int slot, const float* row) {
    float stored[kMaxHeadDim];
    if (layout.key_centre != nullptr) {
        const float* centre = layout.key_centre->centre.data();
        const float* unit = layout.key_centre->unit.data();
        for (int d = 0; d < layout.k_dim; ++d) stored[d] = (row[d] - centre[d]) / unit[d];
        row = stored;
    }
    switch (layout.type) {
        case KvType::f16: return store_half_k(layout, page, slot, row);
        case KvType::q8_0:
        case KvType::q8_0_iq4_nl: return store_int8_k(layout, page, slot, row);
    }
}

void store_v(const PageLayout& layout, std::byte* page, int slot, const float* row) {
    switch (layout.type) {
        case KvType::f16: return store_half_v(layout, page, slot, row);
        case KvType::q8_0: return store_int8_v(layout, page, slot, row);
        case KvType::q8_0_iq4_nl: return store_int4_v(layout, page, slot, row);
    }
}

template <typename T>
inline void move_rows(const std::byte* from, std::byte* to, int n_rows, const LaneMap& map) {
    const T* source = reinterpret_cast<const T*>(from);
    T* target = reinterpret_cast<T*>(to);
    for (int row = 0; row < n_rows * kGroupEntries; row += kGroupEntries)
        map.move(source + row, target + row);
}

void move_keys(const PageLayout& layout, const std::byte* from, int from_group, std::byte* to,
               int to_group, const LaneMoves& moves) {
    const LaneMap map(moves.from, moves.to, moves.n);
    from += layout.k_offset + PageLayout::index(from_group) * layout.k_group_bytes();
    to += layout.k_offset + PageLayout::index(to_group) * layout.k_group_bytes();
    switch (layout.k_unit_bytes) {
        case 2: return move_rows<std::uint16_t>(from, to, layout.k_units, map);
        case 4: return move_rows<std::uint32_t>(from, to, layout.k_units, map);
        default: __builtin_unreachable();  // page_codec.cpp checks its table
    }
}

}  // namespace
}  // namespace entropykv
