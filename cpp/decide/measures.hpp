// Defines the measures of importance in one table: what scores are made of, what the freeze
// schedule detects, and how Python names them. No other code compares ScoreKind values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "decide/kernel_types.hpp"

namespace entropykv {

enum class ScoreKind { streaming, recency, mass, attention, products, reconstruct, predicted };
constexpr std::size_t kNumberOfMeasures = static_cast<std::size_t>(ScoreKind::predicted) + 1;

// Says what the score of an entry is made of.
enum class Evidence {
    position,    // its position in the text
    queries,     // what the queries of the observation window gave to it: see Statistic
    prediction,  // what a linear function of its key and value predicts when it is stored
};

// Says what the freeze schedule knows when it asks for the limit below which an entry is detected.
struct DetectionQuery {
    float rows;        // query rows that were observed
    float even_share;  // the schedule's threshold as a share of one row's attention
    float threshold;   // the schedule's threshold itself
};

struct Measure {
    ScoreKind kind;
    const char* name;
    const char* summary;
    Evidence evidence;
    Statistic statistic;  // what queries are observed to give
    // True if scores are squares. Then norms of values are squared, too, and the products are parts
    // of the squared outputs of a head.
    bool squared;
    // True if the queries of an echo are the only ones that count, if there is an echo.
    bool of_echoes;
    // Computes the scores of n entries from their positions, higher for newer ones; null: scores
    // come from what was observed.
    void (*by_position)(const std::int32_t* positions, int n, std::int32_t newest, float* scores);
    // Returns what must be observed of an entry so that the schedule does not detect it; null: it
    // detects nothing.
    float (*detection_limit)(const DetectionQuery&);
    // True if that limit is a share of attention. Recall must then ask for at least the same share,
    // since the schedule would freeze the entry again otherwise.
    bool of_shares;
    float threshold;  // the default threshold of the schedule

    bool observes() const { return evidence == Evidence::queries; }
    // Tells whether the largest of what queries gave counts, and not the sum.
    bool by_largest() const { return observes() && statistic == Statistic::largest_probability; }
};

// The table has its rows in the order of ScoreKind.
extern const std::array<Measure, kNumberOfMeasures> kMeasures;

// Returns the row of a measure. Throws std::invalid_argument if there is none.
const Measure& measure_of(ScoreKind kind);

}  // namespace entropykv
