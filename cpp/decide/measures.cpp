#include "decide/measures.hpp"

#include <stdexcept>

#include "decide/importance.hpp"

namespace entropykv {
namespace {

// The newer, the higher, and never 0: of ages, floats tell more apart than of positions.
float newness(std::int32_t position, std::int32_t newest, float) {
    return 1.0f / (1.0f + static_cast<float>(newest - position));
}

float little_attention(const LittleQuestion& asked) { return asked.rows * asked.even; }
float little_mass(const LittleQuestion& asked) { return asked.rows * asked.even * asked.even; }
float little_of_one_row(const LittleQuestion& asked) { return asked.even; }
float small_products(const LittleQuestion& asked) { return asked.rows * asked.threshold; }

constexpr Statistic kNone = Statistic::probability;  // of what is not observed
constexpr float kEvenShare = 1.0f;
constexpr float kThresholdOfProducts = 0.5f;  // as the freeze document has it

// By position: of a text, every head keeps the same entries.
constexpr Measure positional(ScoreKind kind, const char* name, const char* summary,
                             float (*score)(std::int32_t, std::int32_t, float)) {
    return {kind,  name,    summary, Evidence::position, kNone, false, false,
            score, nullptr, false,   kEvenShare};
}

}  // namespace

constexpr std::array<Measure, kNumberOfMeasures> kMeasures{{
    positional(ScoreKind::streaming, "streaming", "the newer, the higher", newness),
    // The BitNet document's score.
    positional(ScoreKind::recency, "recency", "exponential decay, a bonus for the newest tenth",
               recency_score),
    // Up to the size of its value, the squared error that dropping the entry would have caused.
    {ScoreKind::mass, "mass", "squared attention probabilities", Evidence::queries,
     Statistic::squared_probability, true, false, nullptr, little_mass, true, kEvenShare},
    // H2O, SnapKV, the layer document.
    {ScoreKind::attention, "attention", "attention probabilities", Evidence::queries,
     Statistic::probability, false, false, nullptr, little_attention, true, kEvenShare},
    // The freeze document: |q.k| says nothing of shares.
    {ScoreKind::products, "products", "|q.k|, scaled as the softmax sees it", Evidence::queries,
     Statistic::product, false, false, nullptr, small_products, false, kThresholdOfProducts},
    // KVzip (Kim et al. 2025, arXiv:2505.23416).
    {ScoreKind::reconstruct, "reconstruct",
     "the largest attention probability of queries that repeat what was read", Evidence::queries,
     Statistic::largest_probability, false, true, nullptr, little_of_one_row, true, kEvenShare},
    {ScoreKind::expected, "expected",
     "attention probabilities that queries like those so far would give from the next positions on",
     Evidence::expectation, kNone, false, false, nullptr, nullptr, false, kEvenShare},
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
