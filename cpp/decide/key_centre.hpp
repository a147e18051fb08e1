// Decides how the keys of a KV head are stored where the model adds a bias to them: without what
// the bias contributes to nearly every key, and in units of their channels. In q8_0, 32 channels
// share a scale, so a few channels with a large bias would make the others coarse. A query is
// multiplied by the units. Then all of its logits change by the same q.centre, which leaves a
// softmax as it is. (Biases are known before the first key; KIVI, Liu et al. 2024,
// arXiv:2402.02750, finds the same channels by quantising groups of keys together.)
#pragma once

#include <vector>

#include "decide/rope_params.hpp"

namespace entropykv {

struct KeyCentre {
    std::vector<float> centre;  // [k_dim]: is subtracted from a key
    std::vector<float> unit;    // [k_dim]: divides what is left
};

// Centres are the means of the rotated bias over this many positions. Pairs with a large bias turn
// by a fraction of a radian within them, so little of the bias is left.
constexpr int kCentredPositions = 8192;

// Returns how to store keys to which a bias is added before RoPE. spread: the standard deviations
// of a key without its bias; bias and spread are [k_dim]. magnitude: the factor by which RoPE
// multiplies keys. The channels of a pair have the same unit, so that a stored pair can be
// rotated as it is. Throws std::invalid_argument if bias and spread are empty, differ in length
// or do not fit the RoPE, or if a value is not finite.
KeyCentre key_centre(const std::vector<float>& bias, const std::vector<float>& spread,
                     const RopeParams& rope, float magnitude);

}  // namespace entropykv
