// Makes models with squared ReLU work in llama.cpp, whose bitnet graph always uses SwiGLU: the gate
// of every layer, silu(gate) * up, becomes relu(gate)^2 * up before it is computed.
#pragma once

#include <vector>

struct ggml_tensor;

namespace entropykv {

class SquaredReluHook {
public:
    explicit SquaredReluHook(int n_layers);
    SquaredReluHook(const SquaredReluHook&) = delete;
    SquaredReluHook& operator=(const SquaredReluHook&) = delete;

    // Changes the node if it is a layer's gate.
    void change(ggml_tensor* node);

    void begin_step();
    // Throws std::runtime_error unless the gate of every layer was changed exactly once since
    // begin_step(), in the graphs of one micro-batch.
    void check_step() const;

private:
    void refuse(const char* why);

    std::vector<int> changed_;       // how many gates of each layer were changed in this step
    const char* refusal_ = nullptr;  // why the first unchanged gate could not be changed
};

}  // namespace entropykv
