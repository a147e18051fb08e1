#include "store/store_common.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace entropykv {
namespace {

void check_importance(const ImportanceSettings& importance) {
    measure_of(importance.kind);  // throws for an unknown measure
    if (importance.observation_window < 1)
        throw std::invalid_argument("observation_window must be 1 or more");
    if (!(importance.decay >= 0.0f && importance.decay <= 1.0f))
        throw std::invalid_argument("decay must be a number from 0 to 1");
    if (!(importance.expected_lookups >= 0.0f && std::isfinite(importance.expected_lookups)))
        throw std::invalid_argument("expected_lookups must be 0 or a positive number");
    if (importance.expected_lookups > 0.0f && !importance.measure().sums_shares())
        throw std::invalid_argument("expected_lookups go with the measures mass and attention");
}

}  // namespace

int most_entries(const LayerShape& shape, int max_entries) {
    return shape.window > 0 ? std::min(max_entries, shape.window + kWindowSlack) : max_entries;
}

void check_protection(const Protection& protection) {
    for (const int n : {protection.n_sinks, protection.recent_window})
        if (n < 0 || n > kMostPositions)
            throw std::invalid_argument("sinks or a recent window outside of 0 .. 2^30 entries");
}

void check_settings(const StoreSettings& settings) {
    for (const int n : {settings.max_tokens, settings.max_entries})
        if (n < 1 || n > kMostPositions)
            throw std::invalid_argument("max_tokens and max_entries must be from 1 to 2^30");
    check_importance(settings.importance);
    check_protection(settings.protection);
}

}  // namespace entropykv
