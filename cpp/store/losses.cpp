#include "store/losses.hpp"

#include <stdexcept>

namespace entropykv {

void Losses::measure(const std::vector<int>& knots) {
    for (std::size_t i = 0; i < knots.size(); ++i)
        if (knots[i] < 0 || (i > 0 && knots[i] <= knots[i - 1]))
            throw std::invalid_argument("knots must ascend");
    parts_.common.knots = knots;
    if (knots.empty()) return;  // what was measured stays
    parts_.over_heads([&](Head& head) { head.losses.assign(knots.size(), 0.0f); });
}

std::vector<double> Losses::last() const {
    std::vector<double> all;
    parts_.over_heads(
        [&](const Head& head) { all.insert(all.end(), head.losses.begin(), head.losses.end()); });
    return all;
}

}  // namespace entropykv
