// Squared ReLU in graphs that llama.cpp builds with SwiGLU (its bitnet graph is hard-wired to it):
// the gate of every layer, silu(gate) * up, becomes relu(gate)^2 * up before it is computed.
#pragma once

#include <vector>

struct ggml_tensor;

namespace entropykv {

class GateHook {
public:
    explicit GateHook(int n_layers);
    GateHook(const GateHook&) = delete;
    GateHook& operator=(const GateHook&) = delete;

    // For llama_context_params.cb_eval and cb_eval_user_data; valid as long as this object.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data);
    // The same for a callback that does more: changes the node if it is a layer's gate.
    void change(ggml_tensor* node);

    void begin_step();
    // Throws std::runtime_error unless the gate of every layer was changed since begin_step(),
    // once: the graphs of one micro-batch.
    void check_step() const;

private:
    void refuse(const char* why);

    std::vector<int> changed_;       // gates of each layer in the graphs of this step
    const char* refusal_ = nullptr;  // of the first gate that was left as it is
};

}  // namespace entropykv
