#include "decide/importance.hpp"

#include <stdexcept>

namespace entropykv {
namespace {

// Computes scores that are higher for newer positions and never 0. They depend on the age, since
// floats could not tell large positions apart.
void newness(const std::int32_t* positions, int n, std::int32_t newest, float* scores) {
    for (int i = 0; i < n; ++i)
        scores[i] = 1.0f / (1.0f + static_cast<float>(newest - positions[i]));
}

float attention_limit(const DetectionQuery& asked) { return asked.rows * asked.even_share; }
float mass_limit(const DetectionQuery& asked) {
    return asked.rows * asked.even_share * asked.even_share;
}
float one_row_limit(const DetectionQuery& asked) { return asked.even_share; }
float product_limit(const DetectionQuery& asked) { return asked.rows * asked.threshold; }

constexpr Statistic kNone = Statistic::probability;  // Measures without observations have this.
constexpr float kEvenShare = 1.0f;
constexpr float kThresholdOfProducts = 0.5f;  // the threshold of Metinov et al.

// Defines a measure that depends on positions only, so that all heads keep the same ones.
constexpr Measure positional(ScoreKind kind, const char* name, const char* summary,
                             decltype(Measure::by_position) score) {
    return {kind,  name,    summary, Evidence::position, kNone, false, false,
            score, nullptr, false,   kEvenShare};
}

}  // namespace

constexpr std::array<Measure, kNumberOfMeasures> kMeasures{{
    positional(ScoreKind::streaming, "streaming", "the newer, the higher", newness),
    // The score of README_ENTROPY_KV, e^(-alpha * distance) plus 0.5 for the newest tenth, falls
    // with the distance, too. It ranks as newness() does, which takes no exponential for each
    // entry.
    positional(ScoreKind::recency, "recency", "exponential decay, a bonus for the newest tenth",
               newness),
    // Multiplied by the squared norm of the value, this is the squared error that dropping the
    // entry would have caused.
    {ScoreKind::mass, "mass", "squared attention probabilities", Evidence::queries,
     Statistic::squared_probability, true, false, nullptr, mass_limit, true, kEvenShare},
    // H2O, SnapKV and Kim and Jung (2025) use this.
    {ScoreKind::attention, "attention", "attention probabilities", Evidence::queries,
     Statistic::probability, false, false, nullptr, attention_limit, true, kEvenShare},
    // Metinov et al. use this. |q.k| is not a share of attention.
    {ScoreKind::products, "products", "|q.k|, scaled as the softmax sees it", Evidence::queries,
     Statistic::product, false, false, nullptr, product_limit, false, kThresholdOfProducts},
    // This is the score of KVzip (Kim et al. 2025, arXiv:2505.23416).
    {ScoreKind::reconstruct, "reconstruct",
     "the largest attention probability of queries that repeat what was read", Evidence::queries,
     Statistic::largest_probability, false, true, nullptr, one_row_limit, true, kEvenShare},
    {ScoreKind::predicted, "predicted",
     "the largest attention probability of a repetition, predicted from key and value",
     Evidence::prediction, kNone, false, false, nullptr, nullptr, false, kEvenShare},
}};

constexpr bool all_have_a_row() {
    for (std::size_t row = 0; row < kMeasures.size(); ++row)
        if (kMeasures[row].name == nullptr || kMeasures[row].kind != static_cast<ScoreKind>(row))
            return false;
    return true;
}
static_assert(all_have_a_row(), "rows of kMeasures must be in the order of ScoreKind");

const Measure& measure_of(ScoreKind kind) {
    const auto row = static_cast<std::size_t>(kind);
    if (row >= kMeasures.size())
        throw std::invalid_argument("a measure of importance that does not exist");
    return kMeasures[row];
}

}  // namespace entropykv
