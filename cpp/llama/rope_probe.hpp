// Reads a model's rotary position embedding off the graph that llama.cpp built.
#pragma once

#include <string>

#include "decide/rope_params.hpp"
#include "llama/device_copies.hpp"

struct ggml_tensor;

namespace entropykv {

struct RopeSeen {
    RopeParams params;
    int head_dim = 0;            // of the rotated keys; 0: they are not rotated
    float magnitude = 1.0f;      // that the rotation multiplied them by
    bool factors_known = true;   // params.freq_factors could be read
    bool short_factors = false;  // they hold for n_ctx_orig positions only
    bool of_part = false;        // what is rotated was joined with what is not
    std::string obstacle;  // why the keys cannot be moved to other positions; empty if they can
};

// `rows`: what a layer writes to the cache as K, [n_head_kv * head_dim, n_tokens]; `copies` has
// seen the nodes before.
RopeSeen look_at_rope(const ggml_tensor* rows, const DeviceCopies& copies);

// Whether a node reads position embeddings that were learned, one for each position.
bool reads_learned_positions(const ggml_tensor* node);

// Looks at the graph of one decode: whether llama.cpp's own K-shift would do to the keys of its
// cache what the model's rotation did. It rotates every layer, and as of llama-cpp-python 0.3.36
// multiplies by the magnitude again.
class KShiftProbe {
public:
    KShiftProbe() = default;
    KShiftProbe(const KShiftProbe&) = delete;
    KShiftProbe& operator=(const KShiftProbe&) = delete;

    // For llama_context_params.cb_eval and cb_eval_user_data; valid as long as this object.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data);

    // Why it would not; empty if it would.
    std::string obstacle() const;

private:
    void look(const ggml_tensor* node);

    int rotated_ = 0;  // layers
    int unrotated_ = 0;
    std::string obstacle_;
    DeviceCopies copies_;
};

}  // namespace entropykv
