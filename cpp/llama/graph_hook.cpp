#include "llama/graph_hook.hpp"

#include <new>
#include <stdexcept>

#include "llama/device_rewrite.hpp"
#include "llama/headwise_rewrite.hpp"

namespace entropykv {

// llama.cpp calls this, so no exception may leave it.
bool GraphHook::on_node(ggml_tensor* node, bool ask, void* user_data) {
    auto* hook = static_cast<GraphHook*>(user_data);
    try {
        if (ask) return hook->see(node);
        if (hook->rewrite_ == nullptr || !hook->rewrite_->attend_instead(node))
            hook->times().end(node);
        return true;
    } catch (const std::bad_alloc&) {
        hook->fault_ = "there is no memory to look at a graph";
    }
    return hook->times().begin();
}

// Returns whether llama.cpp shall compute the graph up to a node before it goes on.
bool GraphHook::see(ggml_tensor* node) {
    if (rewrite_ == nullptr) {
        weights_.change_gate(node);
        probe_.look_at(node);
        return false;
    }
    weights_.change(node);
    return rewrite_->change(node) || times().begin();
}

void GraphHook::serve(AttentionBatch& attention) {
    probe_.end();
    rewrite_ = std::make_unique<HeadwiseRewrite>(attention, probe_.nodes(), fault_);
}

void GraphHook::serve_on_devices(DeviceBatch& batch) {
    probe_.end();
    rewrite_ = std::make_unique<DeviceRewrite>(batch, probe_.nodes(), times(), fault_);
}

void GraphHook::begin_step() {
    if (rewrite_ != nullptr) rewrite_->begin_step();
    fault_ = nullptr;
    weights_.begin_step();
}

void GraphHook::check_step() {
    if (rewrite_ != nullptr) rewrite_->end_step();
    if (const char* fault = fault_.load(); fault != nullptr) throw std::runtime_error(fault);
    if (rewrite_ != nullptr) {
        rewrite_->check_step();
        if (rewrite_->n_served() != rewrite_->n_expected())
            throw std::runtime_error("only " + std::to_string(rewrite_->n_served()) + " of " +
                                     std::to_string(rewrite_->n_expected()) +
                                     " attention nodes were served");
    }
    weights_.check_step();
}

}  // namespace entropykv
