// Scores of entries: higher is kept. Pure functions of what is stored.
#pragma once

#include <cstdint>

#include "decide/measures.hpp"
#include "decide/packed_importance.hpp"

namespace entropykv {

// How entries are ranked.
struct ImportanceSettings {
    ScoreKind kind = ScoreKind::mass;
    float variation = 0.0f;        // for ScoreKind::recency
    float decay = 0.998f;          // per token; 0: only the last micro-batch counts
    int observation_window = 512;  // queries at the end of a micro-batch that count, in tokens
    bool by_exposure = false;      // per query that could have observed the entry
    bool by_values = false;        // times the norm of its V, squared where the measure is
    bool distinct = false;         // less, where a newer entry's key is similar
    int future_positions = 512;    // for ScoreKind::expected
    // How many later queries are expected to give an entry as much as its key and value predict; it
    // is added to what queries gave. 0: nothing is predicted.
    float expected_lookups = 0.0f;

    const Measure& measure() const { return measure_of(kind); }
    // Whether a linear function of key and value says what an entry begins with.
    bool predicts() const {
        return measure().evidence == Evidence::prediction || expected_lookups > 0.0f;
    }
    // The score of an entry by its importance: where a part of that is predicted, both parts.
    float score_of(float importance) const {
        if (!predicts()) return importance;
        const PackedImportance parts(importance);
        const float share = parts.share();
        if (measure().evidence == Evidence::prediction) return share;
        return parts.given() + expected_lookups * (measure().squared ? share * share : share);
    }
    // What is left of an importance when what queries gave is multiplied by a factor.
    float decayed(float importance, float factor) const {
        if (!predicts()) return importance * factor;
        const PackedImportance parts(importance);
        return parts.with_given(parts.given() * factor).packed();
    }
};

// The BitNet document's score: e^(-alpha * distance) + 0.5 for the newest tenth, with
// alpha = 2 / (newest * (1 + variation)); distance = newest - position; variation: standard
// deviation / mean of the profile's head entropies.
float recency_score(std::int32_t position, std::int32_t newest, float variation);

// Queries nearer to an entry than this do not count: every query attends to its neighbours, which
// says little of what later ones need.
constexpr int kNeighbourhood = 32;

// Of tokens that come one by one, those at multiples of this position count, for all of them: to
// observe every one would cost a tenth of decode's attention.
constexpr int kScoringInterval = 4;

// What is left of an importance after n_tokens more tokens; 0 where only the last micro-batch
// counts.
float decay_factor(float decay_per_token, int n_tokens);

// How many queries could have observed an entry of this age (newest position - its own), decayed as
// its importance is; 1 at least.
float exposure(std::int32_t age, const ImportanceSettings& settings);

}  // namespace entropykv
