// How RoPE turns rows of queries and keys, and how to turn them.
#pragma once

#include <cstdint>
#include <vector>

namespace entropykv {

// What the RoPE node before a layer's K write says, by ggml's names.
struct RopeParams {
    int n_dims = 0;     // values of a key that are rotated; 0: its K has no position
    int offset = 0;     // of the first of them
    bool neox = false;  // pairs are (i, i + n_dims / 2), else neighbours
    int n_ctx_orig = 0;
    float freq_base = 10000.0f;
    float freq_scale = 1.0f;
    float ext_factor = 0.0f;
    float beta_fast = 0.0f;
    float beta_slow = 0.0f;
    std::vector<float> freq_factors;  // one for each pair, or none

    bool operator==(const RopeParams& other) const;
};

// Radians per position of every pair. A rotation by a difference of positions needs nothing else:
// the magnitude (attn_factor) is in the stored key already.
std::vector<double> rope_frequencies(const RopeParams& params);

// The position that llama.cpp and the model see of a position of the text. With a shift, the newest
// tokens keep their exact distances, sinks stay where they are, and entries that would come before
// the first token after the sinks are taken to be there: the farthest distance. Clamping of
// distances: ReRoPE (Su 2023), Self-Extend (Jin et al. 2024, arXiv:2401.01325); sinks: StreamingLLM
// (Xiao et al. 2024, arXiv:2309.17453).
inline std::int32_t rope_position(std::int32_t position, int n_sinks, int shift) {
    if (position < n_sinks) return position;
    return position - shift > n_sinks ? position - shift : n_sinks;
}

// Whether rows of so many values can be turned.
bool fits(const RopeParams& params, int dim);

// Turns a row by an angle for every pair: angles are [pair][cosine, sine].
void rotate(const RopeParams& params, const float* angles, float* row);

}  // namespace entropykv
