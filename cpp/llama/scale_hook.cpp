#include "llama/scale_hook.hpp"

#include <ggml-backend.h>
#include <ggml.h>

#include <cstdint>

#include "llama/cpu_nodes.hpp"
#include "llama/custom_op.hpp"

namespace entropykv {
namespace {

// Values one after the other.
bool is_plain_f32(const ggml_tensor* tensor) {
    return tensor->type == GGML_TYPE_F32 && ggml_is_contiguous(tensor) &&
           tensor->buffer != nullptr && ggml_backend_buffer_is_host(tensor->buffer);
}

// Threads share values, not rows: a generated token is a single row.
void scale_op(ggml_tensor* node, int thread, int n_threads, void*) {
    const float scale = *static_cast<const float*>(node->src[1]->data);
    const auto* in = static_cast<const float*>(node->src[0]->data);
    auto* out = static_cast<float*>(node->data);
    const std::int64_t n = ggml_nelements(node);
    const std::int64_t last = n * (thread + 1) / n_threads;
    for (std::int64_t i = n * thread / n_threads; i < last; ++i) out[i] = in[i] * scale;
}

}  // namespace

void change_scaling(ggml_tensor* node) {
    if (node->op != GGML_OP_MUL || ggml_nelements(node->src[1]) != 1) return;
    if (!is_of_cpu(node) || !is_plain_f32(node) || !is_plain_f32(node->src[0]) ||
        !is_plain_f32(node->src[1]))
        return;
    make_custom(node, scale_op, nullptr);
}

bool is_scaling(const ggml_tensor* node) {
    return node->op == GGML_OP_CUSTOM && custom_op_of(node).function == scale_op;
}

}  // namespace entropykv
