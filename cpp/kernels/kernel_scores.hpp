// Part of kernels.cpp: computes from the stored rows what scores of entries need.
#pragma once

#include <type_traits>

#include "kernels/kernel_tile.hpp"

namespace entropykv {
namespace {

inline float half_row_norm(const std::uint16_t* row, int stride) {
    Vec total = zero();
    for (int d = 0; d < stride; d += kLanes) {
        const Vec value = load_half(row + d);
        total = multiply_add(value, value, total);
    }
    return sum(total);
}

// Computes the squared norms of V of four entries, whose values are interleaved. scales: those of
// V, [block][16 entries], from the first of the four on.
template <KvType Type>
inline void byte_row_norms(const std::byte* values, const std::uint16_t* scales, int stride,
                           float* norms) {
    for (int i = 0; i < 4; ++i) norms[i] = 0.0f;
    for (int first = 0; first < stride; first += kQuantBlock) {
        Vec totals[4]{zero(), zero(), zero(), zero()};
        for (int d = first; d < smaller(first + kQuantBlock, stride); d += kLanes) {
            const IntVec bytes = load_value_bytes<Type>(values, d);
            for (int i = 0; i < 4; ++i) {
                const Vec value = to_float(byte_of(bytes, quad_place(i)));
                totals[i] = multiply_add(value, value, totals[i]);
            }
        }
        const std::uint16_t* of_block = scales + first / kQuantBlock * kGroupEntries;
        for (int i = 0; i < 4; ++i) {
            const float scale = half_to_float(of_block[i]);
            norms[i] += sum(totals[i]) * scale * scale;
        }
    }
}

// The number of independent sums of a dot product, whose additions do not wait for each other. The
// stride of a row is a multiple of it.
constexpr int kChains = 4;

struct Chains {
    Vec of[kChains]{zero(), zero(), zero(), zero()};
    Vec sum() const { return (of[0] + of[1]) + (of[2] + of[3]); }
};

// Calls visit(d, chain, keys) for a vector of the entries of a group, and every value of their
// keys.
template <typename Visit>
inline void over_half_keys(const std::byte* keys, int stride, int e, Visit visit) {
    const auto* k = reinterpret_cast<const std::uint16_t*>(keys);
    for (int d = 0; d < stride; d += kChains)
        for (int i = 0; i < kChains; ++i)
            visit(d + i, i, load_half(k + (d + i) * kGroupEntries + e));
}

template <typename Visit>
inline void over_int8_keys(const std::byte* keys, const std::uint16_t* scales, int stride, int e,
                           Visit visit) {
    for (int d = 0; d < stride; d += kChains) {
        const IntVec bytes = flip_high_bits(load_ints(keys + d * kGroupEntries + e * 4));
        const Vec scale = load_half(scales + d / kQuantBlock * kGroupEntries + e);
        for (int i = 0; i < kChains; ++i)
            visit(d + i, i, to_float(byte_of(bytes, quad_place(i))) * scale);
    }
}

template <KvType Type, typename Visit>
inline void over_keys_of(const PageLayout& layout, const std::byte* page, int slot, Visit visit) {
    const int e = slot % kGroupEntries;
    const std::byte* keys = page + layout.k_at(slot - e);
    if constexpr (Type == KvType::f16) {
        over_half_keys(keys, layout.k_stride, e, visit);
    } else if constexpr (kInt8Keys<Type>) {
        const auto* scales = reinterpret_cast<const std::uint16_t*>(page + layout.k_scale_offset);
        over_int8_keys(keys, scales + PageLayout::scale_index(layout.k_blocks, slot - e, 0),
                       layout.k_stride, e, visit);
    } else {
        static_assert(kIsUnknown<Type>, "no keys of this type");
    }
}

// Calls visit(slot, over_keys) for every vector of entries of a page; over_keys(visit) visits its
// keys as over_half_keys() does.
template <typename Visit>
inline void over_page_vectors(const PageLayout& layout, const std::byte* page, Visit visit) {
    with_type(layout.type, [&](auto known) {
        for (int slot = 0; slot < layout.entries; slot += kLanes)
            visit(slot, [&](auto of_key) {
                over_keys_of<decltype(known)::type>(layout, page, slot, of_key);
            });
    });
}

inline void latent_norms(const PageLayout& layout, const std::byte* page, float* norms) {
    over_page_vectors(layout, page, [&](int slot, auto over_keys) {
        Chains total;
        over_keys([&](int d, int i, Vec key) {
            if (d < layout.v_dim) total.of[i] = multiply_add(key, key, total.of[i]);
        });
        store(norms + slot, total.sum());
    });
}

inline void half_norms(const PageLayout& layout, const std::byte* page, float* norms) {
    for (int slot = 0; slot < layout.entries; ++slot)
        norms[slot] = half_row_norm(
            reinterpret_cast<const std::uint16_t*>(page + layout.v_at(slot)), layout.v_stride);
}

template <KvType Type>
inline void byte_norms(const PageLayout& layout, const std::byte* page, float* norms) {
    const auto* scales = reinterpret_cast<const std::uint16_t*>(page + layout.v_scale_offset);
    for (int slot = 0; slot < layout.entries; slot += 4)
        byte_row_norms<Type>(page + layout.v_at(slot),
                             scales + PageLayout::scale_index(layout.v_blocks, slot, 0),
                             layout.v_stride, norms + slot);
}

void value_norms(const PageLayout& layout, const std::byte* page, float* norms) {
    if (layout.latent) return latent_norms(layout, page, norms);
    switch (layout.type) {
        case KvType::f16: return half_norms(layout, page, norms);
        case KvType::q8_0: return byte_norms<KvType::q8_0>(layout, page, norms);
        case KvType::q8_0_iq4_nl: return byte_norms<KvType::q8_0_iq4_nl>(layout, page, norms);
    }
}

// Computes q.k of a vector of entries and `Rows` queries; over_keys: see over_page_vectors().
template <int Rows, typename OverKeys>
inline void vector_products(OverKeys over_keys, const float* queries, int stride, float* out,
                            int out_stride) {
    Chains totals[Rows];
    over_keys([&](int d, int i, Vec key) {
        for (int r = 0; r < Rows; ++r)
            totals[r].of[i] =
                multiply_add(key, broadcast(queries[r * stride + d]), totals[r].of[i]);
    });
    for (int r = 0; r < Rows; ++r) store(out + r * out_stride, totals[r].sum());
}

// Calls visit(number of rows, their queries, their outputs) for one block of rows after another.
template <typename Visit>
inline void over_row_blocks(const float* queries, int rows, int stride, float* out, int out_stride,
                            Visit visit) {
    const auto blocks_of = [&](auto n) {
        for (; rows >= n; rows -= n, queries += n * stride, out += n * out_stride)
            visit(n, queries, out);
    };
    blocks_of(std::integral_constant<int, 4>{});
    blocks_of(std::integral_constant<int, 3>{});
    blocks_of(std::integral_constant<int, 1>{});
}

void products(const PageLayout& layout, const std::byte* page, const float* queries, int rows,
              float* out, int out_stride) {
    over_row_blocks(queries, rows, layout.k_stride, out, out_stride,
                    [&](auto n_rows, const float* block, float* of_block) {
                        over_page_vectors(layout, page, [&](int slot, auto over_keys) {
                            vector_products<n_rows>(over_keys, block, layout.k_stride,
                                                    of_block + slot, out_stride);
                        });
                    });
}

float log_sum(const float* logits, int n) {
    float max = logits[0];
    for (int i = 1; i < n; ++i) max = logits[i] > max ? logits[i] : max;
    const Vec shift = broadcast(max);
    Vec total = zero();
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) total = total + exponential(load(logits + i) - shift);
    float rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
        rest[lane] = i + lane < n ? logits[i + lane] : kMaskedLogit;
    total = total + exponential(load(rest) - shift);
    return max + __builtin_logf(sum(total));
}

}  // namespace
}  // namespace entropykv
