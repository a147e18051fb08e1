// Rotates rows of a micro-batch back to position 0. Expected attention needs this for queries,
// predicted scores need it for keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "decide/query_statistics.hpp"

namespace entropykv {

class InverseRopes {
public:
    // Returns the inverse of a RoPE, which is prepared for every micro-batch from now on. The
    // reference stays valid.
    const InverseRope& of(const RopeParams& rope);
    // Must be called before a micro-batch whose first token RoPE sees at `rope_position`.
    void prepare(std::int32_t rope_position, int n_tokens);
    std::size_t bytes() const;

private:
    std::deque<InverseRope> ropes_{};  // one for every distinct RoPE
};

}  // namespace entropykv
