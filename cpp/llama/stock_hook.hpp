// What a context that is llama.cpp's own gets for comparisons: nodes that can be timed, and the
// gates of a model with squared ReLU, without which it would compute something else.
#pragma once

#include <optional>

#include "llama/gate_hook.hpp"
#include "llama/node_times.hpp"

namespace entropykv {

class StockHook {
public:
    // relu2_layers: of a model with squared ReLU; 0 for any other.
    explicit StockHook(int relu2_layers) {
        if (relu2_layers > 0) gates_.emplace(relu2_layers);
    }

    // For llama_context_params.cb_eval and cb_eval_user_data; valid as long as this object.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data) {
        auto* hook = static_cast<StockHook*>(user_data);
        if (!ask) return hook->times_.end(node), true;
        if (hook->gates_) hook->gates_->change(node);
        return hook->times_.begin();
    }

    NodeTimes& times() { return times_; }

private:
    std::optional<GateHook> gates_;
    NodeTimes times_;
};

}  // namespace entropykv
