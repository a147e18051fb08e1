// Computes where the features of an entry lie (FeatureShape), and what a linear function of them
// predicts.
#pragma once

#include "decide/kernel_types.hpp"
#include "decide/rope_params.hpp"

namespace entropykv {

// Returns where the features of a layer's entries lie. latent: the value is a part of the key.
// Throws std::invalid_argument if `rope`, which rotates the keys, does not fit k_dim.
FeatureShape feature_shape(int k_dim, int v_dim, bool latent, const RopeParams& rope);

// Returns the share of attention whose logarithm was predicted, from kLeastPrediction to 1. A
// logarithm that is not a number gives kLeastPrediction.
float predicted_share(float logarithm);

}  // namespace entropykv
