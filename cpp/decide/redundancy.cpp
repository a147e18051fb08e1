#include "decide/redundancy.hpp"

#include <algorithm>
#include <cmath>

namespace entropykv {

int find_compared(const float* scores, const std::int32_t* positions, int n, int keep,
                  const Protection& protection, std::int32_t newest, std::int32_t* order) {
    int n_candidates = 0;
    int n_protected = 0;
    for (std::int32_t i = 0; i < n; ++i) {
        if (protection.covers(positions[i], newest)) {
            ++n_protected;
        } else if (!protection.has_left(positions[i])) {
            order[n_candidates++] = i;
        }
    }
    const int wanted = keep - n_protected;
    if (wanted <= 0 || wanted >= n_candidates) return 0;
    const int last = std::min(n_candidates, std::max(wanted + kComparedKeys / 2, kComparedKeys));
    const int first = std::max(0, last - kComparedKeys);
    const auto ranks_before = [&](std::int32_t a, std::int32_t b) {
        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    };
    std::nth_element(order, order + first, order + n_candidates, ranks_before);
    if (last < n_candidates)
        std::nth_element(order + first, order + last, order + n_candidates, ranks_before);
    std::copy(order + first, order + last, order);
    std::sort(order, order + (last - first),
              [&](std::int32_t a, std::int32_t b) { return positions[a] < positions[b]; });
    return last - first;
}

void normalise(float* row, int dim) {
    float square = 0.0f;
    for (int d = 0; d < dim; ++d) square += row[d] * row[d];
    const float scale = square > 0.0f ? 1.0f / std::sqrt(square) : 0.0f;
    for (int d = 0; d < dim; ++d) row[d] *= scale;
}

}  // namespace entropykv
