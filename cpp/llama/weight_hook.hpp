// Changes the parts of a graph that use weights: our kernels compute products of quantised weights
// and their scales, and the gates of a model with squared ReLU are corrected.
#pragma once

#include <optional>
#include <string>

#include "llama/node_times.hpp"
#include "llama/product_hook.hpp"
#include "llama/squared_relu_hook.hpp"

namespace entropykv {

class WeightHook {
public:
    // relu2_layers: the number of layers of a model with squared ReLU, or 0. n_threads: the most
    // threads of an op; 0: products and their scales are left to llama.cpp, for comparisons.
    // few_tokens, kernels: see ProductHook.
    WeightHook(int relu2_layers, int n_threads, int few_tokens = 1, const std::string& kernels = "")
        : multiplies_(n_threads > 0), products_(n_threads, few_tokens, kernels) {
        if (relu2_layers > 0) gates_.emplace(relu2_layers);
    }

    // Serves as llama_context_params.cb_eval, with this object as cb_eval_user_data. The object
    // must outlive the context.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data) {
        auto* hook = static_cast<WeightHook*>(user_data);
        if (!ask) return hook->times_.end(node), true;
        hook->change(node);
        return hook->times_.begin();
    }
    void change(ggml_tensor* node) {
        change_gate(node);
        if (!multiplies_) return;
        products_.change(node);
        change_scaling(node);
    }
    // Changes gates only. A probe needs products as llama.cpp made them.
    void change_gate(ggml_tensor* node) {
        if (gates_) gates_->change(node);
    }

    void begin_step() {
        if (gates_) gates_->begin_step();
    }
    // Throws std::runtime_error unless the gate of every layer was changed since begin_step().
    void check_step() const {
        if (gates_) gates_->check_step();
    }
    ProductHook& products() { return products_; }
    const ProductHook& products() const { return products_; }
    NodeTimes& times() { return times_; }

private:
    bool multiplies_;
    std::optional<SquaredReluHook> gates_;
    ProductHook products_;
    NodeTimes times_;
};

}  // namespace entropykv
