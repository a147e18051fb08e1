#include "decide/features.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace entropykv {

FeatureShape feature_shape(int k_dim, int v_dim, bool latent, const RopeParams& rope) {
    if (!fits(rope, k_dim))
        throw std::invalid_argument("RoPE parameters that do not fit the keys of a layer");
    FeatureShape shape{};
    shape.k_dim = k_dim;
    shape.v_dim = latent ? 0 : v_dim;
    shape.n_pairs = rope.n_dims / 2;
    shape.first_pair = rope.offset;
    shape.pair_step = rope.neox ? 1 : 2;
    shape.pair_apart = rope.neox ? shape.n_pairs : 1;
    shape.norms_at = k_dim + shape.v_dim;
    shape.key_log_at = shape.norms_at + shape.n_pairs;
    shape.value_log_at = shape.key_log_at + 1;
    shape.n = shape.value_log_at + (latent ? 0 : 1) + 1;
    return shape;
}

float predicted_share(float logarithm) {
    if (!(logarithm < 0.0f)) return logarithm >= 0.0f ? 1.0f : kLeastPrediction;
    return std::max(std::exp(logarithm), kLeastPrediction);
}

}  // namespace entropykv
