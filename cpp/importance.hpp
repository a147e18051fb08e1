// Scores of entries: higher is kept. Pure functions of what is stored.
#pragma once

#include <cstdint>

namespace entropykv {

enum class ScoreKind {
    streaming,  // the newer, the higher
    recency,    // the BitNet document's position score
    mass,       // squared attention mass that the entry received from the observation window
};

// The BitNet document's score: e^(-alpha * distance) + 0.5 for the newest tenth, with
// alpha = 2 / (newest * (1 + variation)); distance = newest - position; variation: standard
// deviation / mean of the profile's head entropies.
float recency_score(std::int32_t position, std::int32_t newest, float variation);

// The importance by mass is the sum of squared attention probabilities: up to the size of its
// value, the squared error that dropping the entry would have caused. Queries nearer to the entry
// than this do not count: every query attends to its neighbours, which says little of what later
// ones need.
constexpr int kNeighbourhood = 32;

// Of tokens that come one by one, those at multiples of this position score, for all of them: to
// score every one would cost a tenth of decode's attention.
constexpr int kScoringInterval = 4;

// What is left of an importance after n_tokens more tokens; 0 where only the last micro-batch
// counts.
float decay_factor(float decay_per_token, int n_tokens);

}  // namespace entropykv
