#include "store/rope_turns.hpp"

#include <algorithm>

namespace entropykv {

const TurnsBack& RopeTurns::of(const RopeParams& rope) {
    const auto known = std::find_if(turns_.begin(), turns_.end(),
                                    [&](const TurnsBack& turns) { return turns.rope() == rope; });
    return known != turns_.end() ? *known : turns_.emplace_back(rope);
}

void RopeTurns::prepare(std::int32_t rope_position, int n_tokens) {
    for (TurnsBack& turns : turns_) turns.prepare(rope_position, n_tokens);
}

std::size_t RopeTurns::bytes() const {
    std::size_t bytes = 0;
    for (const TurnsBack& turns : turns_) bytes += turns.bytes();
    return bytes;
}

}  // namespace entropykv
