// Describes how RoPE rotates rows of queries and keys, and rotates them.
#pragma once

#include <cstdint>
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
// the newest tokens keep their exact distances, and sinks stay where they are. Entries that would
// come before the first token after the sinks are moved to that token: their distance is clamped.
// Clamping of distances: ReRoPE (Su 2023), Self-Extend (Jin et al. 2024, arXiv:2401.01325); sinks:
// StreamingLLM (Xiao et al. 2024, arXiv:2309.17453).
inline std::int32_t rope_position(std::int32_t position, int n_sinks, int shift) {
    if (position < n_sinks) return position;
    return position - shift > n_sinks ? position - shift : n_sinks;
}

// Tells whether rows with `dim` values can be rotated.
bool fits(const RopeParams& params, int dim);

// Rotates each pair of a row by an angle; angles are [pair][cosine, sine].
void rotate(const RopeParams& params, const float* angles, float* row);

}  // namespace entropykv
