// Custom ops on nodes of llama.cpp's graphs: a node becomes a function of ours, which runs on
// ggml's threads and finds the node's sources as they were. CPU backend only. A changed node stays
// changed when llama.cpp reuses its graph.
#pragma once

#include <ggml.h>

#include <cstring>

namespace entropykv {

// ggml-impl.h's ggml_custom_op_params, which no public header has.
struct CustomOp {
    ggml_custom_op_t function;
    int n_tasks;
    void* user_data;
};
static_assert(sizeof(CustomOp) <= GGML_MAX_OP_PARAMS, "a custom op must fit into op_params");

// All threads will run it. `user_data` must live as long as the context.
inline void make_custom(ggml_tensor* node, ggml_custom_op_t function, void* user_data) {
    const CustomOp op{function, GGML_N_TASKS_MAX, user_data};
    std::memset(node->op_params, 0, sizeof node->op_params);
    std::memcpy(node->op_params, &op, sizeof op);
    node->op = GGML_OP_CUSTOM;
}

// What a node of GGML_OP_CUSTOM runs.
inline CustomOp custom_op_of(const ggml_tensor* node) {
    CustomOp op;
    std::memcpy(&op, node->op_params, sizeof op);
    return op;
}

}  // namespace entropykv
