// Part of kernels.cpp: estimates q.k from the sketches of keys.
#pragma once

#include "kernels/kernel_scores.hpp"
#include "page/key_sketch.hpp"

namespace entropykv {
namespace {

inline void widen(const std::uint16_t* halves, int n, float* out) {
    for (int d = 0; d < n; d += kLanes) store(out + d, load_half(halves + d));
}

static_assert(kSketchValues % kChains == 0,
              "a channel's chain follows from its place in an integer");

// Reads the sketch of the keys of a group, whose minima and steps are converted to floats once.
struct OpenGroup {
    OpenGroup(const KeySketch& sketch, const std::byte* group)
        : k_stride(sketch.k_stride), codes(reinterpret_cast<const std::uint32_t*>(group)) {
        widen(sketch.least(group), k_stride, least);
        widen(sketch.steps(group), k_stride, steps);
    }

    // Calls visit(d, d % kChains, values) for every channel d of a vector of entries that begins
    // with e.
    template <typename Visit>
    void over_keys(int e, Visit visit) const {
        for (int d = 0; d < k_stride; d += kSketchValues) {
            const IntVec values = load_ints(codes + d / kSketchValues * kGroupEntries + e);
            for (int i = 0; i < kSketchValues; ++i)
                visit(d + i, i % kChains,
                      multiply_add(to_float(nibble_of(values, i)), broadcast(steps[d + i]),
                                   broadcast(least[d + i])));
        }
    }

    int k_stride;
    const std::uint32_t* codes;
    float least[kMaxHeadDim];
    float steps[kMaxHeadDim];
};

// Computes the products of a group with few queries: storing its keys as floats would take about as
// long as multiplying them.
template <int Rows>
inline void few_products(const OpenGroup& group, const float* queries, float* out, int out_stride) {
    for (int e = 0; e < kGroupEntries; e += kLanes)
        vector_products<Rows>([&](auto of_key) { group.over_keys(e, of_key); }, queries,
                              group.k_stride, out + e, out_stride);
}

inline void many_products(const OpenGroup& group, const float* queries, int rows, float* out,
                          int out_stride) {
    float keys[kMaxHeadDim * kGroupEntries];
    for (int e = 0; e < kGroupEntries; e += kLanes)
        group.over_keys(e, [&](int d, int, Vec key) { store(keys + d * kGroupEntries + e, key); });
    over_row_blocks(queries, rows, group.k_stride, out, out_stride,
                    [&](auto n_rows, const float* block, float* of_block) {
                        for (int e = 0; e < kGroupEntries; e += kLanes)
                            vector_products<n_rows>(
                                [&](auto of_key) {
                                    for (int d = 0; d < group.k_stride; d += kChains)
                                        for (int i = 0; i < kChains; ++i)
                                            of_key(d + i, i,
                                                   load(keys + (d + i) * kGroupEntries + e));
                                },
                                block, group.k_stride, of_block + e, out_stride);
                    });
}

void sketch_products(const KeySketch& sketch, const std::byte* page, const float* queries, int rows,
                     float* out, int out_stride) {
    for (int i = 0; i < sketch.n_groups; ++i, out += kGroupEntries) {
        const OpenGroup group(sketch, page + PageLayout::index(i) * sketch.group_bytes());
        switch (rows) {
            case 1: few_products<1>(group, queries, out, out_stride); break;
            case 2: few_products<2>(group, queries, out, out_stride); break;
            case 3: few_products<3>(group, queries, out, out_stride); break;
            case 4: few_products<4>(group, queries, out, out_stride); break;
            default: many_products(group, queries, rows, out, out_stride);
        }
    }
}

}  // namespace
}  // namespace entropykv
