// Part of kernels.cpp: converts a tile of K and V to f32 or to pairs of 16-bit integers, for the
// prompt kernel.
#pragma once

#include "kernels/kernel_tile.hpp"

namespace entropykv {
namespace {

// A tile may start anywhere in its first group.
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

template <KvType Type>
inline void convert_byte_v(const PromptTile& tile, const PageLayout& layout, float* out) {
    const int stride = layout.v_stride;
    for (int g = 0; g < tile.n_groups; ++g) {
        const Group& group = tile.groups[g];
        for (int d = 0; d < stride; d += kLanes) {
            float scales[kGroupEntries];
            for (int e = 0; e < kGroupEntries; e += kLanes)
                store(scales + e, load_half(group.v_scales + d / kQuantBlock * kGroupEntries + e));
            for (int e = 0; e < kGroupEntries; e += 4) {
                const std::byte* rows = group.v + e / 4 * four_rows<Type>(layout);
                const IntVec bytes = load_value_bytes<Type>(rows, d);
                for (int i = 0; i < 4; ++i)
                    store(out + (g * kGroupEntries + e + i) * stride + d,
                          to_float(byte_of(bytes, quad_place(i))) * broadcast(scales[e + i]));
            }
        }
    }
}

// Converts K of a tile to [k_stride][kPromptEntries] and V to [entries][v_stride], both in f32 and
// from the first group of the tile on.
template <KvType Type>
inline void convert_k(const PromptTile& tile, const PageLayout& layout, float* out) {
    if constexpr (Type == KvType::f16) {
        convert_half_k(tile, layout, out);
    } else if constexpr (kInt8Keys<Type>) {
        convert_int8_k(tile, layout, out);
    } else {
        static_assert(kIsUnknown<Type>, "no conversion of this type");
    }
}

template <KvType Type>
inline void convert_v(const PromptTile& tile, const PageLayout& layout, float* out) {
    if constexpr (Type == KvType::f16) {
        convert_half_v(tile, layout, out);
    } else if constexpr (Type == KvType::q8_0 || kInt4Values<Type>) {
        convert_byte_v<Type>(tile, layout, out);
    } else {
        static_assert(kIsUnknown<Type>, "no conversion of this type");
    }
}

// Converts K to [k_stride / 2][kPromptEntries] pairs of neighbouring values.
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

// Converts the scales of K to [k_blocks][kPromptEntries]. Scales behind the last entry become 0,
// because the page may hold anything there.
inline void convert_k_scales(const PromptTile& tile, const PageLayout& layout, float* out) {
    for (int block = 0; block < layout.k_blocks; ++block, out += kPromptEntries) {
        for (int e = 0; e < tile.n_groups * kGroupEntries; e += kLanes)
            store(out + e, load_half(tile.groups[e / kGroupEntries].k_scales +
                                     block * kGroupEntries + e % kGroupEntries));
        for (int e = tile.count; e < tile.n_groups * kGroupEntries; ++e) out[e] = 0.0f;
    }
}

// Returns where value d of the entries (2 * pair, 2 * pair + 1) lies: V is [pair][v_stride], and V
// that is a part of K is [v_stride][pair].
template <bool Latent>
inline int pair_place(int stride, int pair, int d) {
    return Latent ? d * (kPromptEntries / 2) + pair : pair * stride + d;
}

// Converts V that is a part of K to 16-bit integers, [v_stride][kPromptEntries].
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

// Converts V to pairs of neighbouring entries: see pair_place().
template <KvType Type>
inline void convert_v_pairs(const PromptTile& tile, const PageLayout& layout, std::int32_t* out) {
    if (layout.latent) return convert_latent_pairs(tile, layout, out);
    const int stride = layout.v_stride;
    for (int g = 0; g < tile.n_groups; ++g) {
        const std::byte* v = tile.groups[g].v;
        for (int e = 0; e < kGroupEntries; e += 4) {
            std::int32_t* pairs = out + (g * kGroupEntries + e) / 2 * stride;
            for (int d = 0; d < stride; d += kLanes) {
                const IntVec bytes = load_value_bytes<Type>(v + e / 4 * four_rows<Type>(layout), d);
                store_ints(pairs + d, even_bytes(bytes));
                store_ints(pairs + stride + d, odd_bytes(bytes));
            }
        }
    }
}

}  // namespace
}  // namespace entropykv
