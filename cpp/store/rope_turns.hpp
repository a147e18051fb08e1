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

// What turns the keys of stored entries back to position 0, wherever RoPE has seen them.
class StoredTurns {
public:
    // Of the positions of a text from `begin` to before `end`; n_sinks, shift: see rope_position().
    StoredTurns(const RopeParams& rope, std::int32_t begin, std::int32_t end, int n_sinks,
                std::int32_t shift)
        : turns_(rope),
          first_(rope_position(begin, n_sinks, shift)),
          n_sinks_(n_sinks),
          shift_(shift) {
        if (begin < end)
            turns_.prepare(first_, rope_position(end - 1, n_sinks, shift) + 1 - first_);
    }
    const float* of(std::int32_t position) const {
        return turns_.of(rope_position(position, n_sinks_, shift_) - first_);
    }

private:
    TurnsBack turns_;
    std::int32_t first_;
    int n_sinks_;
    std::int32_t shift_;
};

}  // namespace entropykv
