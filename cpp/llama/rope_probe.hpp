// Reads the parameters of a model's rotary position embedding from the graph that llama.cpp built.
#pragma once

#include <string>

#include "decide/rope_params.hpp"
#include "llama/device_copies.hpp"

struct ggml_tensor;

namespace entropykv {

struct RopeSeen {
    RopeParams params;
    int head_dim = 0;            // values of a rotated key; 0: keys are not rotated
    float magnitude = 1.0f;      // factor by which the rotation multiplies keys
    bool factors_known = true;   // params.freq_factors could be read
    bool short_factors = false;  // factors hold for n_ctx_orig positions only
    bool of_part = false;        // rotated and other values were concatenated
    std::string obstacle;        // why keys cannot be moved to other positions; empty if they can
};

// Returns how the keys of a layer are rotated. rows: what the layer writes to the cache as K,
// [n_head_kv * head_dim, n_tokens]. copies: must have seen all nodes before.
RopeSeen probe_rope(const ggml_tensor* rows, const DeviceCopies& copies);

// Tells whether a node reads learned position embeddings, one for each position.
bool reads_learned_positions(const ggml_tensor* node);

// Examines the graph of one decode to find out whether llama.cpp's own K-shift would rotate the
// keys in its cache as the model did. The K-shift rotates every layer, and as of llama-cpp-python
// 0.3.36 multiplies by the magnitude again.
class KShiftProbe {
public:
    KShiftProbe() = default;
    KShiftProbe(const KShiftProbe&) = delete;
    KShiftProbe& operator=(const KShiftProbe&) = delete;

    // Serves as llama_context_params.cb_eval, with this object as cb_eval_user_data. The object
    // must outlive the context.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data);

    // Returns why the K-shift would be wrong, or an empty string.
    std::string obstacle() const;

private:
    void probe(const ggml_tensor* node);

    int rotated_ = 0;  // layers whose keys are rotated
    int unrotated_ = 0;
    std::string obstacle_;
    DeviceCopies copies_;
};

}  // namespace entropykv
