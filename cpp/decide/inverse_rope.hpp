// Rotates rows of a micro-batch back to position 0. Expected attention needs this for queries,
// predicted scores need it for keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "decide/rope_params.hpp"

namespace entropykv {

// Holds the cosines and sines that rotate the rows of a micro-batch back to position 0.
class InverseRope {
public:
    explicit InverseRope(const RopeParams& rope)
        : rope_(rope), frequencies_(rope_frequencies(rope)) {}

    const RopeParams& rope() const { return rope_; }
    const std::vector<double>& frequencies() const { return frequencies_; }
    void prepare(std::int32_t first_position, int n_tokens);
    // Returns those of a token: [pair][cosine, sine].
    const float* of(int token) const {
        return rotations_.data() + static_cast<std::size_t>(token) * 2 * frequencies_.size();
    }
    void rotate_back(int token, float* row) const { rotate(rope_, of(token), row); }
    std::size_t bytes() const { return rotations_.capacity() * sizeof(float); }

private:
    RopeParams rope_;
    std::vector<double> frequencies_;
    std::vector<float> rotations_;  // [token][pair][cosine, sine]
};

// The layers of a model have few distinct RoPEs; this holds the inverse of each.
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
