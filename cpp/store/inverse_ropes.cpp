#include "store/inverse_ropes.hpp"

#include <algorithm>

namespace entropykv {

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
