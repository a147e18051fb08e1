#include "decide/importance.hpp"

#include <algorithm>
#include <cmath>

namespace entropykv {

float recency_score(std::int32_t position, std::int32_t newest, float variation) {
    const float span = static_cast<float>(std::max(newest, std::int32_t{1}));
    const float alpha = 2.0f / (span * (1.0f + variation));
    const float distance = static_cast<float>(newest - position);
    const float bonus = distance < 0.1f * span ? 0.5f : 0.0f;
    return std::exp(-alpha * distance) + bonus;
}

float decay_factor(float decay_per_token, int n_tokens) {
    if (decay_per_token <= 0.0f) return 0.0f;
    if (decay_per_token >= 1.0f) return 1.0f;
    return std::pow(decay_per_token, static_cast<float>(n_tokens));
}

}  // namespace entropykv
