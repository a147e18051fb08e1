// What turns the rows of a micro-batch back to position 0, for those who need that: queries that
// are followed, keys that scores are predicted from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "decide/query_statistics.hpp"

namespace entropykv {

class RopeTurns {
public:
    // Of this kind of RoPE, from the next micro-batch on; it stays where it is.
    const TurnsBack& of(const RopeParams& rope);
    // Before a micro-batch whose first token RoPE sees at `rope_position`.
    void prepare(std::int32_t rope_position, int n_tokens);
    std::size_t bytes() const;

private:
    std::deque<TurnsBack> turns_{};  // one for every kind of RoPE that was asked for
};

}  // namespace entropykv
