// Part of kernels.cpp: a tile of q8_0 as pairs of 16-bit integers, for the prompt kernel.
#pragma once

#include "kernels/kernel_convert.hpp"

namespace entropykv {
namespace {

// K as [k_stride / 2][kPromptEntries] pairs of neighbouring values.
inline void convert_k_pairs(const PromptTile& tile, const PageLayout& layout, std::int32_t* out) {
    for (int g = 0; g < tile.n_groups; ++g) {
        const std::byte* k = tile.groups[g].k;
        for (int d = 0; d < layout.k_stride; d += 4) {
            for (int e = 0; e < kGroupEntries; e += kLanes) {
                const IntVec bytes = flip_high_bits(load_ints(k + d * kGroupEntries + e * 4));
                std::int32_t* pairs = out + d / 2 * kPromptEntries + g * kGroupEntries + e;
                store_ints(pairs, even_bytes(bytes));
                store_ints(pairs + kPromptEntries, odd_bytes(bytes));
            }
        }
    }
}

// Scales of K as [k_blocks][kPromptEntries]; 0 behind the last entry, where a page may hold
// anything.
inline void convert_k_scales(const PromptTile& tile, const PageLayout& layout, float* out) {
    for (int block = 0; block < layout.k_blocks; ++block, out += kPromptEntries) {
        for (int e = 0; e < tile.n_groups * kGroupEntries; e += kLanes)
            store(out + e, load_half(tile.groups[e / kGroupEntries].k_scales +
                                     block * kGroupEntries + e % kGroupEntries));
        for (int e = tile.count; e < tile.n_groups * kGroupEntries; ++e) out[e] = 0.0f;
    }
}

// Where value d of the pair (2 * pair, 2 * pair + 1) of entries lies: V as [pair][v_stride], that
// of K as [v_stride][pair].
template <bool Latent>
inline int pair_place(int stride, int pair, int d) {
    return Latent ? d * (kPromptEntries / 2) + pair : pair * stride + d;
}

// V that is a part of K: 16-bit integers by value, [v_stride][kPromptEntries].
inline void convert_latent_pairs(const PromptTile& tile, const PageLayout& layout,
                                 std::int32_t* out) {
    auto* shorts = reinterpret_cast<std::int16_t*>(out);
    for (int g = 0; g < tile.n_groups; ++g) {
        const std::byte* k = tile.groups[g].k;
        for (int d = 0; d < layout.v_stride; d += 4) {
            for (int e = 0; e < kGroupEntries; e += kLanes) {
                const IntVec bytes = flip_high_bits(load_ints(k + d * kGroupEntries + e * 4));
                for (int i = 0; i < 4; ++i)
                    store_shorts(shorts + (d + i) * kPromptEntries + g * kGroupEntries + e,
                                 byte_of(bytes, quad_place(i)));
            }
        }
    }
}

// V as pairs of neighbouring entries: see pair_place().
inline void convert_v_pairs(const PromptTile& tile, const PageLayout& layout, std::int32_t* out) {
    if (layout.latent) return convert_latent_pairs(tile, layout, out);
    const int stride = layout.v_stride;
    for (int g = 0; g < tile.n_groups; ++g) {
        const std::byte* v = tile.groups[g].v;
        for (int e = 0; e < kGroupEntries; e += 4) {
            std::int32_t* pairs = out + (g * kGroupEntries + e) / 2 * stride;
            for (int d = 0; d < stride; d += kLanes) {
                const IntVec bytes = load_ints(v + e * stride + d * 4);
                store_ints(pairs + d, even_bytes(bytes));
                store_ints(pairs + stride + d, odd_bytes(bytes));
            }
        }
    }
}

}  // namespace
}  // namespace entropykv
