// Leaves the graphs of a llama.cpp context as they are, for comparisons, except for the gates of a
// model with squared ReLU, which would compute something else. It can also time nodes.
#pragma once

#include <optional>

#include "llama/node_times.hpp"
#include "llama/squared_relu_hook.hpp"

namespace entropykv {

class StockHook {
public:
    // relu2_layers: the number of layers of a model with squared ReLU, or 0.
    explicit StockHook(int relu2_layers) {
        if (relu2_layers > 0) gates_.emplace(relu2_layers);
    }

    // Serves as llama_context_params.cb_eval, with this object as cb_eval_user_data. The object
    // must outlive the context.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data) {
        auto* hook = static_cast<StockHook*>(user_data);
        if (!ask) return hook->times_.end(node), true;
        if (hook->gates_) hook->gates_->change(node);
        return hook->times_.begin();
    }

    NodeTimes& times() { return times_; }

private:
    std::optional<SquaredReluHook> gates_;
    NodeTimes times_;
};

}  // namespace entropykv
