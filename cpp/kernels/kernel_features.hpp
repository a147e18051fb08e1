// Part of kernels.cpp: computes the features of entries (FeatureShape), linear functions of them,
// and the sums of their products that a fit needs.
#pragma once

#include "decide/kernel_types.hpp"
#include "kernels/kernel_tile.hpp"

namespace entropykv {
namespace {

inline float dot(const float* a, const float* b, int n) {
    Vec sums[2] = {zero(), zero()};
    int d = 0;
    for (; d + 2 * kLanes <= n; d += 2 * kLanes) {
        sums[0] = multiply_add(load(a + d), load(b + d), sums[0]);
        sums[1] = multiply_add(load(a + d + kLanes), load(b + d + kLanes), sums[1]);
    }
    for (; d + kLanes <= n; d += kLanes) sums[0] = multiply_add(load(a + d), load(b + d), sums[0]);
    float total = sum(sums[0] + sums[1]);
    for (; d < n; ++d) total += a[d] * b[d];
    return total;
}

inline float log_norm(const float* row, int n) {
    return __builtin_logf(__builtin_sqrtf(dot(row, row, n)) + kLeastNorm);
}

// Rotates the pairs of a key, which are `Step` values apart, and computes their norms.
template <int Step>
inline void rotate_pairs(const float* first, const float* second, const float* rotation, int n,
                         float* to_first, float* to_second, float* norms) {
    for (int i = 0; i < n; ++i) {
        const float x = first[i * Step];
        const float y = second[i * Step];
        const float cosine = rotation[2 * i];
        const float sine = rotation[2 * i + 1];
        to_first[i * Step] = x * cosine - y * sine;
        to_second[i * Step] = x * sine + y * cosine;
        norms[i] = __builtin_sqrtf(x * x + y * y);
    }
}

// Computes the features of the key, at their places in `out`. rotation: [pair][cosine, sine].
inline void key_features(const FeatureShape& shape, const float* key, const float* rotation,
                         float* out) {
    for (int d = 0; d < shape.k_dim; ++d) out[d] = key[d];
    const float* first = key + shape.first_pair;
    const float* second = first + shape.pair_apart;
    float* to_first = out + shape.first_pair;
    float* to_second = to_first + shape.pair_apart;
    float* norms = out + shape.norms_at;
    if (shape.pair_step == 1)
        rotate_pairs<1>(first, second, rotation, shape.n_pairs, to_first, to_second, norms);
    else
        rotate_pairs<2>(first, second, rotation, shape.n_pairs, to_first, to_second, norms);
    out[shape.key_log_at] = log_norm(key, shape.k_dim);
}

void features(const FeatureShape& shape, const float* key, const float* value,
              const float* rotation, float* out) {
    key_features(shape, key, rotation, out);
    for (int d = 0; d < shape.v_dim; ++d) out[shape.k_dim + d] = value[d];
    if (shape.v_dim > 0) out[shape.value_log_at] = log_norm(value, shape.v_dim);
    out[shape.n - 1] = 1.0f;
}

// Returns the linear function of all features but those of the value, which is the whole function
// if the value is a part of the key.
float predict_key(const FeatureShape& shape, const float* weights, const float* key,
                  const float* rotation) {
    float of_key[kMaxFeatures];
    key_features(shape, key, rotation, of_key);
    const int norms = shape.norms_at;
    return dot(weights, of_key, shape.k_dim) +
           dot(weights + norms, of_key + norms, shape.key_log_at + 1 - norms) +
           weights[shape.n - 1];
}

float predict_value(const FeatureShape& shape, const float* weights, const float* value) {
    return dot(weights + shape.k_dim, value, shape.v_dim) +
           weights[shape.value_log_at] * log_norm(value, shape.v_dim);
}

void add_products(const float* rows, int n_rows, int stride, int n, double* sums) {
    constexpr int kColumns = 4;
    for (int i = 0; i < n; i += kColumns) {
        const int columns = smaller(kColumns, n - i);
        for (int j = 0; j < i + columns; j += kLanes) {
            Vec products[kColumns] = {zero(), zero(), zero(), zero()};
            for (int row = 0; row < n_rows; ++row) {
                const float* values = rows + static_cast<std::size_t>(row) * stride;
                const Vec others = load(values + j);
                for (int c = 0; c < kColumns; ++c)
                    products[c] = multiply_add(broadcast(values[i + c]), others, products[c]);
            }
            for (int c = 0; c < columns; ++c) {
                float added[kLanes];
                store(added, products[c]);
                const auto line = static_cast<std::size_t>(i + c);
                double* of_line = sums + line * (line + 1) / 2 + j;
                const int last = smaller(kLanes, i + c + 1 - j);
                for (int lane = 0; lane < last; ++lane)
                    of_line[lane] += static_cast<double>(added[lane]);
            }
        }
    }
}

}  // namespace
}  // namespace entropykv
