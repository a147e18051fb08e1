#include "decide/eviction.hpp"

#include <algorithm>
#include <functional>

namespace entropykv {
namespace {

// If a selection drops at most this many entries, the lowest scores are collected in a heap, which
// nearly all other scores leave as it is.
constexpr int kFewDropped = 64;

// Returns the score that is the wanted-th highest of n, which are put in another order.
float highest(float* scores, int n, int wanted) {
    const int n_low = n - wanted + 1;
    if (n_low > kFewDropped) {
        std::nth_element(scores, scores + (wanted - 1), scores + n, std::greater<float>());
        return scores[wanted - 1];
    }
    std::make_heap(scores, scores + n_low);
    for (int i = n_low; i < n; ++i) {
        if (scores[i] >= scores[0]) continue;
        std::pop_heap(scores, scores + n_low);
        scores[n_low - 1] = scores[i];
        std::push_heap(scores, scores + n_low);
    }
    return scores[0];
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
    // branches. The bounds are copied, since the compiler must expect that writing marks changes
    // what it refers to.
    const std::int32_t oldest = protection.oldest;
    const std::int32_t first = protection.first_open();
    const std::int32_t last = protection.last_open(newest);
    int n_kept = 0;
    for (int i = 0; i < n; ++i) {
        const bool closed = (positions[i] < first) | (positions[i] > last);
        const bool covered = closed & (positions[i] >= oldest);
        kept[i] = covered ? 1 : 0;
        n_kept += covered ? 1 : 0;
    }
    int n_candidates = 0;
    for (int i = 0; i < n; ++i) {
        const bool open = (positions[i] >= first) & (positions[i] <= last);
        scratch[n_candidates] = scores[i];
        n_candidates += open ? 1 : 0;
    }
    int wanted = std::min(keep - n_kept, n_candidates);
    if (wanted <= 0) return n_kept;
    const float threshold = highest(scratch, n_candidates, wanted);
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
