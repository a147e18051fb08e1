#include "decide/inverse_rope.hpp"

#include <algorithm>
#include <cmath>

namespace entropykv {

void InverseRope::prepare(std::int32_t first_position, int n_tokens) {
    rotations_.resize(static_cast<std::size_t>(n_tokens) * 2 * frequencies_.size());
    float* out = rotations_.data();
    for (int token = 0; token < n_tokens; ++token)
        for (const double frequency : frequencies_) {
            const double angle = -frequency * (first_position + token);
            *out++ = static_cast<float>(std::cos(angle));
            *out++ = static_cast<float>(std::sin(angle));
        }
}

const InverseRope& InverseRopes::of(const RopeParams& rope) {
    const auto known = std::find_if(ropes_.begin(), ropes_.end(), [&](const InverseRope& inverse) {
        return inverse.rope() == rope;
    });
    return known != ropes_.end() ? *known : ropes_.emplace_back(rope);
}

void InverseRopes::prepare(std::int32_t rope_position, int n_tokens) {
    for (InverseRope& inverse : ropes_) inverse.prepare(rope_position, n_tokens);
}

std::size_t InverseRopes::bytes() const {
    std::size_t bytes = 0;
    for (const InverseRope& inverse : ropes_) bytes += inverse.bytes();
    return bytes;
}

}  // namespace entropykv
