// Defines how entries are scored; entries with higher scores are kept longer. One table has all
// measures of importance: what a score is made of, what the freeze schedule detects, and how Python
// names the measure. Code outside of decide/ does not compare ScoreKind values. Pure functions.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "decide/kernel_types.hpp"

namespace entropykv {

enum class ScoreKind { streaming, recency, mass, attention, products, reconstruct, predicted };
constexpr std::size_t kNumberOfMeasures = static_cast<std::size_t>(ScoreKind::predicted) + 1;

// Says what the score of an entry is made of.
enum class Evidence {
    position,    // the entry's position in the text
    queries,     // what the queries of the observation window gave to the entry: see Statistic
    prediction,  // what a linear function of key and value predicts when the entry is stored
};

// Says what the freeze schedule knows when it asks for the limit below which an entry is detected.
struct DetectionQuery {
    float rows;        // query rows that were observed
    float even_share;  // the schedule's threshold as a share of one row's attention
    float threshold;   // the schedule's threshold itself
};

// If tokens come one by one, only those at positions that are multiples of this are observed, each
// on behalf of all tokens since the last observed one. Observing every token would take a tenth of
// the time of attention in decode.
constexpr int kScoringInterval = 4;

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
    // Returns what must be observed of an entry so that the schedule does not detect it; null: the
    // schedule detects no entry.
    float (*detection_limit)(const DetectionQuery&);
    // True if detection_limit is a share of attention. Recall must then ask for at least the same
    // share, since the schedule would freeze the entry again otherwise.
    bool of_shares;
    float threshold;  // the default threshold of the schedule

    bool observes() const { return evidence == Evidence::queries; }
    // Tells whether the queries of n_tokens tokens that are read together, the first one at
    // `position`, are observed. interval: see kScoringInterval.
    bool observes(int n_tokens, std::int32_t position, int interval = kScoringInterval) const {
        return observes() && (n_tokens > 1 || position % interval == 0);
    }
    // Tells whether shares of attention are added up, perhaps squared.
    bool sums_shares() const { return of_shares && !by_largest(); }
    // Tells whether the largest of what queries gave counts, and not the sum.
    bool by_largest() const { return observes() && statistic == Statistic::largest_probability; }
};

// The table has its rows in the order of ScoreKind.
extern const std::array<Measure, kNumberOfMeasures> kMeasures;

// Returns the row of a measure. Throws std::invalid_argument if there is none.
const Measure& measure_of(ScoreKind kind);

// Packs the importance of an entry into 32 bits if a part of it is predicted: two numbers share the
// float that every entry has. The upper 20 bits are the upper bits of a float: what queries gave,
// which decays. The lower 12 bits are the share of attention that a later query is expected to
// give, which stays: the upper bits of a float from 2^-20 to 1, counted from those of 2^-20. Read
// as a float, all 32 bits are what queries gave, up to rounding, so the checks of importance apply
// to them.
class PackedImportance {
public:
    explicit PackedImportance(float packed) : bits_(bits_of(packed)) {}
    PackedImportance(float given, float share) : bits_(rounded(given) | code_of(share)) {}

    // Returns what queries gave, with 12 bits of precision.
    float given() const { return float_of(bits_ & ~kShareMask); }
    // Returns the largest share of its attention that a later query is expected to give, from 2^-20
    // to 1, with 8 bits of precision.
    float share() const { return float_of(kLeastShare + ((bits_ & kShareMask) << kShareShift)); }
    PackedImportance with_given(float given) const {
        return PackedImportance(rounded(given) | (bits_ & kShareMask));
    }
    PackedImportance with_larger_share(float share) const {
        return PackedImportance((bits_ & ~kShareMask) |
                                std::max(bits_ & kShareMask, code_of(share)));
    }
    float packed() const { return float_of(bits_); }

private:
    static constexpr std::uint32_t kShareMask = 0xfffu;
    static constexpr std::uint32_t kShareShift = 16;
    static constexpr std::uint32_t kLeastShare = 0x35800000u;  // 2^-20 as a float
    static constexpr std::uint32_t kOne = 0x3f800000u;
    // This is the largest finite float whose lower bits are 0.
    static constexpr std::uint32_t kLargest = 0x7f7ff000u;

    explicit PackedImportance(std::uint32_t bits) : bits_(bits) {}
    static std::uint32_t bits_of(float value) {
        std::uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    }
    static float float_of(std::uint32_t bits) {
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    static std::uint32_t rounded(float given) {
        const std::uint32_t bits = (bits_of(given) + (kShareMask >> 1) + 1) & ~kShareMask;
        return given > 0.0f ? std::min(bits, kLargest) : 0;
    }
    static std::uint32_t code_of(float share) {
        if (!(share > float_of(kLeastShare))) return 0;
        const std::uint32_t bits = std::min(bits_of(share), kOne);
        return (bits - kLeastShare + (1u << (kShareShift - 1))) >> kShareShift;
    }

    std::uint32_t bits_;
};

struct ImportanceSettings {
    ScoreKind kind = ScoreKind::mass;
    float decay = 0.998f;          // per token
    int observation_window = 512;  // how many of a micro-batch's last tokens are observed
    bool by_values = false;        // multiply by the norm of V, squared if scores are
    // How many later queries are assumed to give an entry the share of attention that its key and
    // value predict. This number times the share (squared if scores are squares) is added to what
    // queries gave. 0: nothing is added.
    float expected_lookups = 0.0f;

    const Measure& measure() const { return measure_of(kind); }
    // Tells whether a linear function of key and value gives the initial importance of an entry.
    bool predicts() const {
        return measure().evidence == Evidence::prediction || expected_lookups > 0.0f;
    }
    // Returns the score of an entry from its importance. If a part of that is predicted, the score
    // is the predicted share alone, or what queries gave plus what the expected lookups give.
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

// Returns which part of an importance is left after n_tokens more tokens.
inline float decay_factor(float decay_per_token, int n_tokens) {
    if (decay_per_token <= 0.0f) return 0.0f;
    if (decay_per_token >= 1.0f) return 1.0f;
    return std::pow(decay_per_token, static_cast<float>(n_tokens));
}

}  // namespace entropykv
