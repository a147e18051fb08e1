// Part of kernels.cpp: rows of a tile of entries, and how their values are read.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace entropykv {
namespace {

constexpr int kMaxBlocks = kMaxHeadDim / kQuantBlock;

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

}  // namespace
}  // namespace entropykv
