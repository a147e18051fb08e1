// Computes scores of entries from their positions or their importance; a higher score is kept
// longer. Pure functions.
#pragma once

#include <cstdint>

#include "decide/measures.hpp"
#include "decide/packed_importance.hpp"

namespace entropykv {

// Says how entries are scored.
struct ImportanceSettings {
    ScoreKind kind = ScoreKind::mass;
    float decay = 0.998f;          // per token
    int observation_window = 512;  // how many of a micro-batch's last tokens are observed
    bool by_values = false;        // multiply by the norm of V, squared if scores are
    // How many later queries are assumed to give an entry the share of attention that its key and
    // value predict; this is added to what queries gave. 0: nothing is predicted.
    float expected_lookups = 0.0f;

    const Measure& measure() const { return measure_of(kind); }
    // Tells whether a linear function of key and value gives the initial importance of an entry.
    bool predicts() const {
        return measure().evidence == Evidence::prediction || expected_lookups > 0.0f;
    }
    // Returns the score of an entry, which combines both parts of its importance if one is
    // predicted.
    float score_of(float importance) const {
        if (!predicts()) return importance;
        const PackedImportance parts(importance);
        const float share = parts.share();
        if (measure().evidence == Evidence::prediction) return share;
        return parts.given() + expected_lookups * (measure().squared ? share * share : share);
    }
    // Returns the importance after what queries gave was multiplied by a factor.
    float decayed(float importance, float factor) const {
        if (!predicts()) return importance * factor;
        const PackedImportance parts(importance);
        return parts.with_given(parts.given() * factor).packed();
    }
};

// Queries nearer to an entry than this do not count: every query attends to its neighbours, which
// says little about what later queries need.
constexpr int kNeighbourhood = 32;

// If tokens come one by one, only those at multiples of this position are observed, on behalf of
// all of them. Observing every token would take a tenth of the time of attention in decode.
constexpr int kScoringInterval = 4;

// Returns which part of an importance is left after n_tokens more tokens.
float decay_factor(float decay_per_token, int n_tokens);

}  // namespace entropykv
