// Part of kernels.cpp: estimates q.k from the sketches of keys.
#pragma once

#include "kernels/kernel_scores.hpp"
#include "page/key_sketch.hpp"

namespace entropykv {
namespace {

inline void widen(const std::uint16_t* halves, int n, float* out) {
    for (int d = 0; d < n; d += kLanes) store(out + d, load_half(halves + d));
}

// Converts the sketch of a group's keys to floats, [k_stride][16 entries].
inline void open_sketch(const KeySketch& sketch, const std::byte* group, float* keys) {
    float least[kMaxHeadDim];
    float steps[kMaxHeadDim];
    widen(sketch.least(group), sketch.k_stride, least);
    widen(sketch.steps(group), sketch.k_stride, steps);
    const auto* codes = reinterpret_cast<const std::uint32_t*>(group);
    for (int d = 0; d < sketch.k_stride; d += kSketchValues) {
        for (int e = 0; e < kGroupEntries; e += kLanes) {
            const IntVec values = load_ints(codes + d / kSketchValues * kGroupEntries + e);
            for (int i = 0; i < kSketchValues; ++i)
                store(keys + (d + i) * kGroupEntries + e,
                      multiply_add(to_float(nibble_of(values, i)), broadcast(steps[d + i]),
                                   broadcast(least[d + i])));
        }
    }
}

void sketch_products(const KeySketch& sketch, const std::byte* page, const float* queries, int rows,
                     float* out, int out_stride) {
    float keys[kMaxHeadDim * kGroupEntries];
    for (int group = 0; group < sketch.n_groups; ++group) {
        open_sketch(sketch, page + PageLayout::index(group) * sketch.group_bytes(), keys);
        over_row_blocks(queries, rows, sketch.k_stride, out + group * kGroupEntries, out_stride,
                        [&](auto n_rows, const float* block, float* of_block) {
                            for (int e = 0; e < kGroupEntries; e += kLanes)
                                vector_products<n_rows>(
                                    [&](auto of_key) {
                                        for (int d = 0; d < sketch.k_stride; d += kChains)
                                            for (int i = 0; i < kChains; ++i)
                                                of_key(d + i, i,
                                                       load(keys + (d + i) * kGroupEntries + e));
                                    },
                                    block, sketch.k_stride, of_block + e, out_stride);
                        });
    }
}

}  // namespace
}  // namespace entropykv
