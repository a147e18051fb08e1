#include "decide/eviction.hpp"

#include <algorithm>
#include <functional>

namespace entropykv {

int entries_to_keep(int budget, int n_new, const Protection& protection) {
    const int beyond = budget - protection.n_sinks - protection.recent_window;
    const int room = std::clamp(beyond / 4, 1, kDecodeRoom);
    return n_new >= room ? budget : budget - room + n_new;
}

int select_survivors(const float* scores, const std::int32_t* positions, int n, int keep,
                     const Protection& protection, std::int32_t newest, std::uint8_t* kept,
                     float* scratch) {
    int n_candidates = 0;
    int n_kept = 0;
    for (int i = 0; i < n; ++i) {
        kept[i] = protection.covers(positions[i], newest) ? 1 : 0;
        if (kept[i] != 0) {
            ++n_kept;
        } else if (!protection.has_left(positions[i])) {
            scratch[n_candidates++] = scores[i];
        }
    }
    int wanted = std::min(keep - n_kept, n_candidates);
    if (wanted <= 0) return n_kept;
    std::nth_element(scratch, scratch + (wanted - 1), scratch + n_candidates,
                     std::greater<float>());
    const float threshold = scratch[wanted - 1];
    const auto open = [&](int i) { return kept[i] == 0 && !protection.has_left(positions[i]); };
    for (int i = 0; i < n; ++i) {
        if (!open(i) || scores[i] <= threshold) continue;
        kept[i] = 1;
        ++n_kept;
        --wanted;
    }
    for (int i = 0; i < n && wanted > 0; ++i) {
        if (!open(i) || scores[i] != threshold) continue;
        kept[i] = 1;
        ++n_kept;
        --wanted;
    }
    return n_kept;
}

}  // namespace entropykv
