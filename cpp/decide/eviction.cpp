#include "decide/eviction.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>

namespace entropykv {
namespace {

// Up to this number of scores, the wanted one is searched among all of them.
constexpr int kFew = 512;
// How many scores are looked at to guess between which two the wanted one is.
constexpr int kSampled = 384;

struct Range {
    float least = -std::numeric_limits<float>::infinity();
    float most = std::numeric_limits<float>::infinity();
};

// Returns a range that the wanted-th highest of n_open scores at positions from `first` to `last`
// is likely to be in, guessed from evenly spaced ones.
Range likely_range(const float* scores, const std::int32_t* positions, int n, std::int32_t first,
                   std::int32_t last, int n_open, int wanted) {
    if (n_open <= kFew) return {};
    std::array<float, kSampled> sample{};
    int n_sampled = 0;
    for (int k = 0; k < kSampled; ++k) {
        const auto i = static_cast<int>(std::int64_t{n} * k / kSampled);
        sample[static_cast<std::size_t>(n_sampled)] = scores[i];
        n_sampled += (positions[i] >= first) & (positions[i] <= last) ? 1 : 0;
    }
    // Three standard deviations of how many of the sample are higher than the wanted score.
    const float part = static_cast<float>(wanted) / static_cast<float>(n_open);
    const float higher = part * static_cast<float>(n_sampled);
    const float margin = 3.0f * std::sqrt(higher * (1.0f - part)) + 2.0f;
    const auto of_rank = [&](float rank, float otherwise) {
        if (rank < 0.0f || rank >= static_cast<float>(n_sampled)) return otherwise;
        float* at = sample.data() + static_cast<int>(rank);
        std::nth_element(sample.data(), at, sample.data() + n_sampled, std::greater<float>());
        return *at;
    };
    const Range all;
    const float most = of_rank(higher - margin, all.most);
    return {of_rank(higher + margin, all.least), most};
}

// Returns the wanted-th highest of the n_open scores at positions from `first` to `last`. Only
// those in a likely range are compared with each other: a partial sort of all would take a jump for
// every score that a CPU cannot predict.
float highest(const float* scores, const std::int32_t* positions, int n, std::int32_t first,
              std::int32_t last, int n_open, int wanted, float* scratch) {
    Range range = likely_range(scores, positions, n, first, last, n_open, wanted);
    while (true) {
        int n_above = 0;
        int n_within = 0;
        for (int i = 0; i < n; ++i) {
            const float score = scores[i];
            const int open = (positions[i] >= first) & (positions[i] <= last);
            const int above = open & (score > range.most);
            const int below = score < range.least;
            scratch[n_within] = score;
            n_within += open - above - (open & below);
            n_above += above;
        }
        const int nth = wanted - n_above - 1;
        if (nth >= 0 && nth < n_within) {
            std::nth_element(scratch, scratch + nth, scratch + n_within, std::greater<float>());
            return scratch[nth];
        }
        range = {};  // all scores are in it
    }
}

}  // namespace

int most_decode_room(int budget) {
    return std::clamp(budget / kMostDecodeRoom, kDecodeRoom, kMostDecodeRoom);
}

int entries_to_keep(int budget, int n_new, const Protection& protection) {
    const int beyond = budget - protection.n_sinks - protection.recent_window;
    const int room = std::clamp(beyond / 4, 1, most_decode_room(beyond));
    return n_new >= room ? budget : budget - room + n_new;
}

int select_survivors(const float* scores, const std::int32_t* positions, int n, int keep,
                     const Protection& protection, std::int32_t newest, std::uint8_t* kept,
                     float* scratch) {
    // Loops have no branches that depend on scores or positions: a CPU could not predict such
    // branches. The bounds are copied, since the compiler must expect that writing to kept[]
    // changes `protection`.
    const std::int32_t oldest = protection.oldest;
    const std::int32_t first = protection.first_open();
    const std::int32_t last = protection.last_open(newest);
    int n_kept = 0;
    int n_open = 0;
    for (int i = 0; i < n; ++i) {
        const bool closed = (positions[i] < first) | (positions[i] > last);
        const bool covered = closed & (positions[i] >= oldest);
        kept[i] = covered ? 1 : 0;
        n_kept += covered ? 1 : 0;
        n_open += closed ? 0 : 1;
    }
    int wanted = std::min(keep - n_kept, n_open);
    if (wanted <= 0) return n_kept;
    const float threshold = highest(scores, positions, n, first, last, n_open, wanted, scratch);
    int n_above = 0;
    for (int i = 0; i < n; ++i) {
        const bool open = (positions[i] >= first) & (positions[i] <= last);
        const bool above = open & (scores[i] > threshold);
        kept[i] = static_cast<std::uint8_t>(kept[i] | (above ? 1 : 0));
        n_above += above ? 1 : 0;
    }
    n_kept += n_above;
    wanted -= n_above;
    for (int i = 0; i < n && wanted > 0; ++i) {
        if (scores[i] != threshold || !protection.leaves_open(positions[i], newest)) continue;
        kept[i] = 1;
        ++n_kept;
        --wanted;
    }
    return n_kept;
}

}  // namespace entropykv
