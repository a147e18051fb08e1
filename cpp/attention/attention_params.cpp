#include "attention/attention_params.hpp"

#include <cmath>

namespace entropykv {

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

}  // namespace entropykv
