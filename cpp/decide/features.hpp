// The features of entries (feature_shape.hpp), and what a linear function of them predicts.
#pragma once

#include "decide/feature_shape.hpp"
#include "decide/rope_params.hpp"

namespace entropykv {

// Of a layer whose keys RoPE turns so. Throws std::invalid_argument where that does not fit them.
FeatureShape feature_shape(int k_dim, int v_dim, bool latent, const RopeParams& rope);

// The share of attention of which the logarithm was predicted, from kLeastPrediction to 1; the
// least one where it is no number.
float predicted_share(float logarithm);

}  // namespace entropykv
