// Part of kernels.cpp: rows of K and V into the slots of a page.
#pragma once

#include "kernel_tile.hpp"

namespace entropykv {
namespace {

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
}  // namespace entropykv
