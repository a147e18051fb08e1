#include "page/key_sketch.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "platform/half.hpp"

namespace entropykv {

void KeySketch::draw(const PageLayout& layout, const std::byte* page, float* keys,
                     std::byte* sketch) const noexcept {
    constexpr int kMost = kSketchLevels - 1;
    std::memset(sketch, 0, page_bytes());
    for (int group = 0; group < n_groups; ++group, sketch += group_bytes()) {
        for (int e = 0; e < kGroupEntries; ++e)
            load_k(layout, page, group * kGroupEntries + e, keys + e * k_dim);
        auto* codes = reinterpret_cast<std::uint32_t*>(sketch);
        auto* least_values = reinterpret_cast<std::uint16_t*>(sketch + codes_bytes());
        for (int d = 0; d < k_dim; ++d) {
            float low = keys[d];
            float high = keys[d];
            for (int e = 1; e < kGroupEntries; ++e) {
                low = std::min(low, keys[e * k_dim + d]);
                high = std::max(high, keys[e * k_dim + d]);
            }
            const std::uint16_t least = float_to_half(low);
            const std::uint16_t step = float_to_half((high - low) / static_cast<float>(kMost));
            least_values[d] = least;
            least_values[k_stride + d] = step;
            const float first = half_to_float(least);
            const float size = half_to_float(step);
            const float inverse = size > 0.0f ? 1.0f / size : 0.0f;
            for (int e = 0; e < kGroupEntries; ++e) {
                const float level = std::nearbyint((keys[e * k_dim + d] - first) * inverse);
                const float bounded = std::clamp(level, 0.0f, static_cast<float>(kMost));
                codes[d / kSketchValues * kGroupEntries + e] |= static_cast<std::uint32_t>(bounded)
                                                                << d % kSketchValues * 4;
            }
        }
    }
}

}  // namespace entropykv
