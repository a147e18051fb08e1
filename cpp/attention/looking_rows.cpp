#include "attention/looking_rows.hpp"

#include <algorithm>

namespace entropykv {

QueryRows looking_rows(const Call& call, int head) noexcept {
    const PageLayout& layout = call.layout();
    const Step& step = call.step;
    const int group = call.split.group;
    float* rows = call.worker.recall();
    const int n_looking = std::clamp(kMostQueryRows / group, 1, step.n_text);
    std::int32_t* positions = call.worker.recall_positions();
    float* slopes =
        call.params.slopes != nullptr ? rows + kMostQueryRows * layout.k_stride : nullptr;
    int n = 0;
    for (int token = step.n_text - n_looking; token < step.n_text; ++token) {
        for (int g = 0; g < std::min(group, kMostQueryRows); ++g, ++n) {
            positions[n] = step.base_position + token;
            if (slopes != nullptr) slopes[n] = call.params.slopes[head * group + g];
            const float* query = call.query.row(token, head * group + g);
            float* row = rows + n * layout.k_stride;
            for (int d = 0; d < layout.k_dim; ++d) row[d] = query[d] * call.params.scale;
            std::fill(row + layout.k_dim, row + layout.k_stride, 0.0f);
        }
    }
    return {rows, n, layout.k_stride, call.params.softcap, positions, slopes};
}

}  // namespace entropykv
