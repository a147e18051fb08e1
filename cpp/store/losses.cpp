#include "store/losses.hpp"

#include <stdexcept>

namespace entropykv {

void measure_losses(StoreParts& parts, const std::vector<int>& knots) {
    for (std::size_t i = 0; i < knots.size(); ++i)
        if (knots[i] < 0 || (i > 0 && knots[i] <= knots[i - 1]))
            throw std::invalid_argument("knots must ascend");
    parts.common.knots = knots;
    if (knots.empty()) return;  // what was measured stays
    parts.over_heads([&](Head& head) {
        head.losses.assign(knots.size(), 0.0f);
        head.held_losses.assign(knots.size(), 0.0f);
    });
}

std::vector<double> last_losses(const StoreParts& parts, bool of_held) {
    std::vector<double> all;
    for (const StoreLayer& layer : parts.layers) {
        for (const Head& head : layer.heads) {
            const std::vector<float>& losses = of_held ? head.held_losses : head.losses;
            all.insert(all.end(), losses.begin(), losses.end());
        }
    }
    return all;
}

}  // namespace entropykv
