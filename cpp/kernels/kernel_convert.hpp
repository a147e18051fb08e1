// Part of kernels.cpp: a tile of K and V in f32, for the prompt kernel.
#pragma once

#include "kernels/kernel_tile.hpp"

namespace entropykv {
namespace {

// A tile starts anywhere in its first group.
constexpr int kPromptGroups = kEntryTile / kGroupEntries + 1;
constexpr int kPromptEntries = kPromptGroups * kGroupEntries;
using PromptTile = Tile<kPromptGroups>;

inline void convert_half_k(const PromptTile& tile, const PageLayout& layout, float* out) {
    for (int g = 0; g < tile.n_groups; ++g) {
        const auto* k = reinterpret_cast<const std::uint16_t*>(tile.groups[g].k);
        for (int d = 0; d < layout.k_stride; ++d)
            for (int e = 0; e < kGroupEntries; e += kLanes)
                store(out + d * kPromptEntries + g * kGroupEntries + e,
                      load_half(k + d * kGroupEntries + e));
    }
}

inline void convert_int8_k(const PromptTile& tile, const PageLayout& layout, float* out) {
    for (int g = 0; g < tile.n_groups; ++g) {
        const Group& group = tile.groups[g];
        for (int d = 0; d < layout.k_stride; d += 4) {
            const std::uint16_t* scales = group.k_scales + d / kQuantBlock * kGroupEntries;
            for (int e = 0; e < kGroupEntries; e += kLanes) {
                const IntVec bytes = flip_high_bits(load_ints(group.k + d * kGroupEntries + e * 4));
                const Vec scale = load_half(scales + e);
                for (int i = 0; i < 4; ++i)
                    store(out + (d + i) * kPromptEntries + g * kGroupEntries + e,
                          to_float(byte_of(bytes, quad_place(i))) * scale);
            }
        }
    }
}

inline void convert_half_v(const PromptTile& tile, const PageLayout& layout, float* out) {
    const int n = layout.v_stride * kGroupEntries;
    for (int g = 0; g < tile.n_groups; ++g) {
        const auto* v = reinterpret_cast<const std::uint16_t*>(tile.groups[g].v);
        for (int i = 0; i < n; i += kLanes) store(out + g * n + i, load_half(v + i));
    }
}

inline void convert_int8_v(const PromptTile& tile, const PageLayout& layout, float* out) {
    const int stride = layout.v_stride;
    for (int g = 0; g < tile.n_groups; ++g) {
        const Group& group = tile.groups[g];
        for (int d = 0; d < stride; d += kLanes) {
            float scales[kGroupEntries];
            for (int e = 0; e < kGroupEntries; e += kLanes)
                store(scales + e, load_half(group.v_scales + d / kQuantBlock * kGroupEntries + e));
            for (int e = 0; e < kGroupEntries; e += 4) {
                const IntVec bytes = load_ints(group.v + e * stride + d * 4);
                for (int i = 0; i < 4; ++i)
                    store(out + (g * kGroupEntries + e + i) * stride + d,
                          to_float(byte_of(bytes, quad_place(i))) * broadcast(scales[e + i]));
            }
        }
    }
}

// K of a tile as [k_stride][kPromptEntries], V as [entries][v_stride], both in f32 and from the
// tile's first group on.
template <KvType Type>
inline void convert_k(const PromptTile& tile, const PageLayout& layout, float* out) {
    if constexpr (Type == KvType::f16) {
        convert_half_k(tile, layout, out);
    } else if constexpr (Type == KvType::q8_0) {
        convert_int8_k(tile, layout, out);
    } else {
        static_assert(kIsUnknown<Type>, "no conversion of this type");
    }
}

template <KvType Type>
inline void convert_v(const PromptTile& tile, const PageLayout& layout, float* out) {
    if constexpr (Type == KvType::f16) {
        convert_half_v(tile, layout, out);
    } else if constexpr (Type == KvType::q8_0) {
        convert_int8_v(tile, layout, out);
    } else {
        static_assert(kIsUnknown<Type>, "no conversion of this type");
    }
}

}  // namespace
}  // namespace entropykv
