// Computes where the features of an entry lie (FeatureShape), and what a linear function of them
// predicts.
#pragma once

#include "decide/kernel_types.hpp"
#include "decide/rope_params.hpp"

namespace entropykv {

// Returns the features of a layer whose keys are rotated by `rope`. Throws std::invalid_argument if
// it does not fit the keys.
FeatureShape feature_shape(int k_dim, int v_dim, bool latent, const RopeParams& rope);

// Returns the share of attention whose logarithm was predicted, from kLeastPrediction to 1. A
// logarithm that is not a number gives kLeastPrediction.
float predicted_share(float logarithm);

}  // namespace entropykv
