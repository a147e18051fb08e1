#include "decide/importance.hpp"

#include <cmath>

namespace entropykv {

float decay_factor(float decay_per_token, int n_tokens) {
    if (decay_per_token <= 0.0f) return 0.0f;
    if (decay_per_token >= 1.0f) return 1.0f;
    return std::pow(decay_per_token, static_cast<float>(n_tokens));
}

}  // namespace entropykv
