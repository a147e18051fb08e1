// What becomes of the weights' part of a graph, whatever its cache: products of quantised weights
// go to our kernels, their scales too, and the gates of a model with squared ReLU become that.
#pragma once

#include <optional>

#include "llama/gate_hook.hpp"
#include "llama/node_times.hpp"
#include "llama/product_hook.hpp"
#include "llama/scale_hook.hpp"

namespace entropykv {

class WeightHook {
public:
    // relu2_layers: of a model with squared ReLU; 0 for any other. n_threads: most of an op.
    // in_company: see ProductHook.
    WeightHook(int relu2_layers, int n_threads, bool in_company = false)
        : products_(n_threads, in_company) {
        if (relu2_layers > 0) gates_.emplace(relu2_layers);
    }

    // For llama_context_params.cb_eval and cb_eval_user_data; valid as long as this object.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data) {
        auto* hook = static_cast<WeightHook*>(user_data);
        if (!ask) return hook->times_.end(node), true;
        hook->change(node);
        return hook->times_.begin();
    }
    void change(ggml_tensor* node) {
        change_gate(node);
        products_.change(node);
        change_scaling(node);
    }
    // Leaves products as they are, for those who look at the graph.
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
    const ProductHook& products() const { return products_; }
    NodeTimes& times() { return times_; }

private:
    std::optional<GateHook> gates_;
    ProductHook products_;
    NodeTimes times_;
};

}  // namespace entropykv
