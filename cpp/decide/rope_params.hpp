// Describes how RoPE rotates rows of queries and keys, rotates them, and rotates keys back to
// position 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace entropykv {

// Holds the parameters of the RoPE node before a layer's K write, named as in ggml.
struct RopeParams {
    int n_dims = 0;     // values of a key that are rotated; 0: K has no position
    int offset = 0;     // index of the first rotated value
    bool neox = false;  // pairs are (i, i + n_dims / 2); otherwise neighbours
    int n_ctx_orig = 0;
    float freq_base = 10000.0f;
    float freq_scale = 1.0f;
    float ext_factor = 0.0f;
    float beta_fast = 0.0f;
    float beta_slow = 0.0f;
    std::vector<float> freq_factors;  // one for each pair, or none

    bool operator==(const RopeParams& other) const;
};

// Returns the radians per position of every pair. Moving a key needs nothing else: the magnitude
// (attn_factor) is part of the stored key already.
std::vector<double> rope_frequencies(const RopeParams& params);

// Returns the position that llama.cpp and the model see for a position of the text. With a shift,
// the newest tokens keep the distances that they have in the text, and sinks stay where they are.
// Entries that would come before the first token after the sinks are moved to that token: their
// distance is clamped. Clamping of distances: ReRoPE (Su 2023), Self-Extend (Jin et al. 2024,
// arXiv:2401.01325); sinks: StreamingLLM (Xiao et al. 2024, arXiv:2309.17453).
inline std::int32_t rope_position(std::int32_t position, int n_sinks, int shift) {
    if (position < n_sinks) return position;
    return position - shift > n_sinks ? position - shift : n_sinks;
}

// Tells whether rows with `dim` values can be rotated.
bool fits(const RopeParams& params, int dim);

// Rotates each pair of a row by an angle; angles are [pair][cosine, sine].
void rotate(const RopeParams& params, const float* angles, float* row);

// Holds the cosines and sines that rotate the rows of a micro-batch back to position 0.
class InverseRope {
public:
    explicit InverseRope(const RopeParams& rope)
        : rope_(rope), frequencies_(rope_frequencies(rope)) {}

    const RopeParams& rope() const { return rope_; }
    const std::vector<double>& frequencies() const { return frequencies_; }
    void prepare(std::int32_t first_position, int n_tokens);
    // Returns the cosines and sines of a token: [pair][cosine, sine].
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

// Holds the rotations that turn the stored keys of a text back to position 0, although RoPE has
// seen them at rope_position() of their positions in the text.
class StoredInverseRope {
public:
    // Covers the positions [begin, end). n_sinks, shift: see rope_position().
    StoredInverseRope(const RopeParams& rope, std::int32_t begin, std::int32_t end, int n_sinks,
                      std::int32_t shift)
        : inverse_(rope),
          first_(rope_position(begin, n_sinks, shift)),
          n_sinks_(n_sinks),
          shift_(shift) {
        if (begin < end)
            inverse_.prepare(first_, rope_position(end - 1, n_sinks, shift) + 1 - first_);
    }
    const float* of(std::int32_t position) const {
        return inverse_.of(rope_position(position, n_sinks_, shift_) - first_);
    }

private:
    InverseRope inverse_;
    std::int32_t first_;
    int n_sinks_;
    std::int32_t shift_;
};

// The layers of a model have few distinct RoPEs; this holds the inverse of each.
class InverseRopes {
public:
    // Returns the inverse of a RoPE, which is prepared for every micro-batch from now on. The
    // reference stays valid.
    const InverseRope& of(const RopeParams& rope);
    // Computes the rotations of a micro-batch, before it is read; RoPE sees its first token at
    // `rope_position`.
    void prepare(std::int32_t rope_position, int n_tokens);
    std::size_t bytes() const;

private:
    std::deque<InverseRope> ropes_{};  // one for every distinct RoPE
};

}  // namespace entropykv
