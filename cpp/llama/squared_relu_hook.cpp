#include "llama/squared_relu_hook.hpp"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "llama/graph_nodes.hpp"
#include "llama/product_hook.hpp"

namespace entropykv {
namespace {

// Returns N if a node is a product with the weight blk.N<suffix>, perhaps scaled or with a bias;
// otherwise -1. Names of weights are used because they are part of the file format, unlike names of
// nodes.
int layer_of(const ggml_tensor* node, const char* suffix) {
    while (node != nullptr &&
           (node->op == GGML_OP_MUL || node->op == GGML_OP_ADD || is_scaling(node)))
        node = node->src[0];
    if (node == nullptr || !is_product(node)) return -1;
    const char* name = node->src[0]->name;
    if (std::strncmp(name, "blk.", 4) != 0) return -1;
    char* end = nullptr;
    const long layer = std::strtol(name + 4, &end, 10);
    return std::strcmp(end, suffix) == 0 ? static_cast<int>(layer) : -1;
}

bool is_split_swiglu(const ggml_tensor* node) {
    return node->op == GGML_OP_GLU && ggml_get_glu_op(node) == GGML_GLU_OP_SWIGLU &&
           node->src[1] != nullptr;
}

// Returns a row of a tensor, counted over all dimensions but the first.
float* row_of(const ggml_tensor* tensor, std::int64_t row) {
    const std::int64_t i1 = row % tensor->ne[1];
    const std::int64_t i2 = row / tensor->ne[1] % tensor->ne[2];
    const std::int64_t i3 = row / tensor->ne[1] / tensor->ne[2];
    char* data = static_cast<char*>(tensor->data);
    return reinterpret_cast<float*>(data + i1 * static_cast<std::int64_t>(tensor->nb[1]) +
                                    i2 * static_cast<std::int64_t>(tensor->nb[2]) +
                                    i3 * static_cast<std::int64_t>(tensor->nb[3]));
}

void relu2_row(const float* gate, const float* up, float* out, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
        const float positive = gate[i] < 0.0f ? 0.0f : gate[i];  // keeps NaN
        out[i] = positive * positive * up[i];
    }
}

// Threads share elements instead of rows, because one token is a single row.
void relu2_op(ggml_tensor* node, int thread, int n_threads, void*) {
    const std::int64_t width = node->ne[0];
    const std::int64_t total = width * ggml_nrows(node);
    const std::int64_t last = total * (thread + 1) / n_threads;
    for (std::int64_t at = total * thread / n_threads; at < last;) {
        const std::int64_t row = at / width;
        const std::int64_t column = at % width;
        const std::int64_t n = std::min(width - column, last - at);
        relu2_row(row_of(node->src[0], row) + column, row_of(node->src[1], row) + column,
                  row_of(node, row) + column, n);
        at += n;
    }
}

// Returns why relu2_op() cannot compute this gate, or null.
const char* obstacle(const ggml_tensor* node) {
    if (node->op_params[1] != 0) return "its gate and up projections are swapped";
    for (const ggml_tensor* tensor :
         {static_cast<const ggml_tensor*>(node), static_cast<const ggml_tensor*>(node->src[0]),
          static_cast<const ggml_tensor*>(node->src[1])}) {
        if (tensor->type != GGML_TYPE_F32) return "a gate is not computed in f32";
        if (tensor->nb[0] != sizeof(float) || !ggml_are_same_shape(tensor, node))
            return "a gate has an unknown layout";
        if (tensor->buffer != nullptr && !ggml_backend_buffer_is_host(tensor->buffer))
            return "a gate is computed on a device";
    }
    return node->buffer == nullptr || is_of_cpu(node) ? nullptr : "a gate is computed on a device";
}

}  // namespace

SquaredReluHook::SquaredReluHook(int n_layers)
    : changed_(static_cast<std::size_t>(std::max(n_layers, 0))) {}

void SquaredReluHook::refuse(const char* why) {
    if (refusal_ == nullptr) refusal_ = why;
}

void SquaredReluHook::change(ggml_tensor* node) {
    if (node->op == GGML_OP_CUSTOM) {  // llama.cpp reused the graph
        const CustomOp op = custom_op_of(node);
        if (op.function == relu2_op) ++*static_cast<int*>(op.user_data);
        return;
    }
    if (!is_split_swiglu(node)) return;
    const int layer = layer_of(node->src[0], ".ffn_gate.weight");
    if (layer < 0 || layer_of(node->src[1], ".ffn_up.weight") != layer)
        return refuse("one is not of its layer's ffn_gate and ffn_up");
    if (layer >= static_cast<int>(changed_.size()))
        return refuse("one is of a layer that the file does not declare");
    if (const char* why = obstacle(node)) return refuse(why);
    int& changed = changed_[static_cast<std::size_t>(layer)];
    make_custom(node, relu2_op, &changed);
    ++changed;
}

void SquaredReluHook::begin_step() {
    std::fill(changed_.begin(), changed_.end(), 0);
    refusal_ = nullptr;
}

void SquaredReluHook::check_step() const {
    const auto n_layers = static_cast<std::ptrdiff_t>(changed_.size());
    const auto n_changed = std::count(changed_.begin(), changed_.end(), 1);
    if (n_changed == n_layers && refusal_ == nullptr) return;
    std::string message = "its file asks for squared ReLU, but only " + std::to_string(n_changed) +
                          " of " + std::to_string(n_layers) +
                          " layers have one SwiGLU gate that can be changed to it";
    if (refusal_ != nullptr) message += std::string(" (") + refusal_ + ")";
    throw GraphError(message + "; convert the model again as architecture bitnet");
}

}  // namespace entropykv
