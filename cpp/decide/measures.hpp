// What the measures of importance mean, in one table: what their scores are made of, what the
// schedule of freezing calls little, and how Python names them. Nothing else asks which one it is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "decide/statistic.hpp"

namespace entropykv {

enum class ScoreKind {
    streaming,
    recency,
    mass,
    attention,
    products,
    reconstruct,
    expected,
    predicted
};
constexpr std::size_t kNumberOfMeasures = static_cast<std::size_t>(ScoreKind::predicted) + 1;

// What the score of an entry is made of.
enum class Evidence {
    position,     // where it stands in the text
    queries,      // what the queries of the observation window gave to it: see Statistic
    expectation,  // what queries like those so far would give to it: see query_statistics.hpp
    prediction,   // what a linear function of its key and value says when it is written
};

// What the schedule of freezing asks: whether a step found little in an entry.
struct LittleQuestion {
    float rows;       // query rows that were observed
    float even;       // the schedule's threshold, as a share of the attention of one row
    float threshold;  // the same as it is
};

struct Measure {
    ScoreKind kind;
    const char* name;
    const char* summary;
    Evidence evidence;
    Statistic statistic;  // of queries
    // Scores are squares, so that the norms of values count squared, too; with these, they are
    // parts of the squared outputs of a head.
    bool squared;
    // Where queries repeat the text, they alone are observed.
    bool of_echoes;
    // The score by position, the higher the newer; null: of what was given.
    float (*by_position)(std::int32_t position, std::int32_t newest, float variation);
    // Of what is observed of an entry, what is too little for the schedule; null: nothing is.
    float (*little)(const LittleQuestion&);
    // Whether that is a share of attention, which recall must then ask for, too: what the schedule
    // would freeze again must not come back.
    bool of_shares;
    float threshold;  // of the schedule, unless somebody says another one

    bool observes() const { return evidence == Evidence::queries; }
    // Whether the largest of what queries gave counts, and not the sum.
    bool by_largest() const { return observes() && statistic == Statistic::largest_probability; }
};

extern const std::array<Measure, kNumberOfMeasures> kMeasures;  // in the order of ScoreKind

// The row of a measure. Throws std::invalid_argument where there is none.
const Measure& measure_of(ScoreKind kind);

}  // namespace entropykv
