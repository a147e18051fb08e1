// Reads a model's rotary position embedding off the graph that llama.cpp built.
#pragma once

#include <string>

#include "rope.hpp"

struct ggml_tensor;

namespace entropykv {

struct RopeSeen {
    RopeParams params;
    int head_dim = 0;            // of the rotated keys; 0: they are not rotated
    bool short_factors = false;  // freq_factors hold for n_ctx_orig positions only
    std::string obstacle;  // why its keys cannot be moved to other positions; empty if they can
};

// `rows`: what a layer writes to the cache as K, [n_head_kv * head_dim, n_tokens].
RopeSeen look_at_rope(const ggml_tensor* rows);

// Whether a node reads position embeddings that were learned, one for each position.
bool reads_learned_positions(const ggml_tensor* node);

}  // namespace entropykv
