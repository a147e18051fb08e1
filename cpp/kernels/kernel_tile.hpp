// Part of kernels.cpp: cuts entries into tiles of groups, which a kernel computes at a time, and
// calls code that is compiled for the KV type of a page.
#pragma once

#include <type_traits>

#include "kernels/kernels.hpp"
#include "platform/repeat.hpp"
#include "platform/simd.hpp"

// Every combination of rows and vectors is a function of its own. Inlined into one function, they
// would take the compiler minutes.
#define ENTROPYKV_NOINLINE __attribute__((noinline))

namespace entropykv {
namespace {

template <KvType Type>
struct KnownType {
    static constexpr KvType type = Type;
};

// Calls run(KnownType). There is no default branch, so the compiler reports a missing type.
template <typename Run>
inline void with_type(KvType type, Run run) {
    switch (type) {
        case KvType::f16: return run(KnownType<KvType::f16>{});
        case KvType::q8_0: return run(KnownType<KvType::q8_0>{});
        case KvType::q8_0_iq4_nl: return run(KnownType<KvType::q8_0_iq4_nl>{});
    }
}

template <KvType Type>
constexpr bool kInt8Keys = Type == KvType::q8_0 || Type == KvType::q8_0_iq4_nl;
template <KvType Type>
constexpr bool kInt4Values = Type == KvType::q8_0_iq4_nl;
template <KvType Type>
constexpr int kValueBits = kInt4Values<Type> ? 4 : 8;

// Goes into the last branch of code that distinguishes types, so that a type without a branch does
// not compile.
template <KvType Type>
constexpr bool kIsUnknown = false;

constexpr float kLargestShort = 32767.0f;
constexpr int kMaxBlocks = kMaxHeadDim / kQuantBlock;

// Returns the bytes of 4 entries from value d of their rows on, in q8_0 or iq4_nl; `values`: the
// first byte of the first value. The vector must not leave the half of a block.
template <KvType Type>
inline IntVec load_value_bytes(const std::byte* values, int d) {
    if constexpr (kInt4Values<Type>) {
        constexpr int half = kQuantBlock / 2;
        const IntVec codes = load_ints(values + (d / kQuantBlock * half + d % half) * 4);
        return looked_up(nibbles(codes, d % kQuantBlock / half), kValueLevels);
    } else {
        return load_ints(values + d * 4);
    }
}

// Returns the bytes that four entries take in V.
template <KvType Type>
inline int four_rows(const PageLayout& layout) {
    return layout.v_stride * kValueBits<Type> / 2;
}

template <typename T>
constexpr T smaller(T a, T b) {
    return a < b ? a : b;
}

// Refers to 16 neighbouring entries of a page.
struct Group {
    const std::byte* k;
    const std::byte* v;
    const std::uint16_t* k_scales;
    const std::uint16_t* v_scales;
    const std::int32_t* positions;
};

// Refers to neighbouring entries as whole groups. The first group begins with `skipped` entries
// that do not belong to them.
template <int Groups>
struct Tile {
    int skipped;
    int count;  // includes the skipped entries
    int n_groups;
    Group groups[Groups];
};

// Refers to the entries of a range from `first` on, at most `most` of them.
template <int Groups>
inline void open_tile(const EntryRange& range, int first, int most, Tile<Groups>& tile) {
    const PageLayout& layout = *range.layout;
    const int per_page = layout.entries / kGroupEntries;
    const std::size_t k_bytes = layout.k_group_bytes();
    const std::size_t v_bytes = layout.v_group_bytes();
    const int group = first / kGroupEntries;
    tile.skipped = first % kGroupEntries;
    tile.count = first < range.last ? smaller(range.last - first, most) + tile.skipped : 0;
    tile.n_groups = (tile.count + kGroupEntries - 1) / kGroupEntries;
    int page_index = group / per_page;
    int in_page = group % per_page;
    for (int g = 0; g < tile.n_groups; ++g) {
        const std::byte* page = range.pages[page_index];
        const auto n = static_cast<std::size_t>(in_page);
        tile.groups[g] = {page + layout.k_offset + n * k_bytes,
                          page + layout.v_offset + n * v_bytes,
                          reinterpret_cast<const std::uint16_t*>(page + layout.k_scale_offset) +
                              PageLayout::scale_index(layout.k_blocks, in_page * kGroupEntries, 0),
                          reinterpret_cast<const std::uint16_t*>(page + layout.v_scale_offset) +
                              PageLayout::scale_index(layout.v_blocks, in_page * kGroupEntries, 0),
                          layout.positions(page) + in_page * kGroupEntries};
        if (++in_page == per_page) {
            in_page = 0;
            ++page_index;
        }
    }
}

}  // namespace
}  // namespace entropykv
