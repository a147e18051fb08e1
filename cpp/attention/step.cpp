#include "attention/step.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/kernels.hpp"

namespace entropykv {
namespace {

constexpr int kMostKept = 8192;  // With more entries, weights are computed again to be observed.

}  // namespace

std::vector<float> alibi_slopes(int n_head, float max_bias) {
    int power = 1;  // becomes the largest power of 2 that is not above n_head
    while (2 * power <= n_head) power *= 2;
    const auto base = [&](float bias) { return std::pow(2.0f, -bias / static_cast<float>(power)); };
    std::vector<float> slopes(static_cast<std::size_t>(n_head));
    for (int head = 0; head < n_head; ++head)
        slopes[static_cast<std::size_t>(head)] =
            head < power
                ? std::pow(base(max_bias), static_cast<float>(head + 1))
                : std::pow(base(max_bias / 2.0f), static_cast<float>(2 * (head - power) + 1));
    return slopes;
}

Step Step::of_token(int token, int scoring_interval) const {
    Step step = *this;
    step.n_tokens = step.n_text = 1;
    step.n_drafts = 0;
    step.base_position = base_position + token;
    step.observing = importance.measure().observes() && step.base_position % scoring_interval == 0;
    return step;
}

int Step::first_observed_row(const Split& split) const {
    // All queries of an echo count. Measure reconstruct counts no other queries if there is an
    // echo.
    const bool echo_alone =
        n_text < n_tokens && (importance.measure().of_echoes || (observing_echo && !observing));
    const int first = echo_alone ? n_text : n_text - importance.observation_window;
    return std::max(0, first) * split.group;
}

int Step::observed_bands(const Split& split) const {
    return (split.tiles - 1) / split.band_tiles - first_observed_tile(split) / split.band_tiles + 1;
}

bool Step::keeps_weights(const Split& split, int total) const noexcept {
    return (observing || observing_echo) && split.by_rows && !split.by_entries &&
           total <= kMostKept && importance.measure().statistic != Statistic::product;
}

std::size_t Step::most_kept_floats(const Split& split, int most) const noexcept {
    const int total = std::min(most, kMostKept);
    if (!keeps_weights(split, total)) return 0;
    // The entries lie in up to three ranges, each of which may begin inside a tile.
    const auto tiles = static_cast<std::size_t>(total / kEntryTile + 3);
    return tiles * static_cast<std::size_t>(kKeptFloats);
}

}  // namespace entropykv
