// Turns nodes of llama.cpp's graphs into custom ops: functions of ours, which run on ggml's threads
// and find the sources of the node unchanged. Only the CPU backend can run them; if another device
// got one, the process would abort. When llama.cpp reuses a graph, changed nodes stay changed.
#pragma once

#include <ggml.h>

#include <cstring>

namespace entropykv {

// Copies ggml_custom_op_params of ggml-impl.h, which no public header declares.
struct CustomOp {
    ggml_custom_op_t function;
    int n_tasks;
    void* user_data;
};
static_assert(sizeof(CustomOp) <= GGML_MAX_OP_PARAMS, "a custom op must fit into op_params");

// Makes all threads run the function. `user_data` must live as long as the context.
inline void make_custom(ggml_tensor* node, ggml_custom_op_t function, void* user_data) {
    const CustomOp op{function, GGML_N_TASKS_MAX, user_data};
    std::memset(node->op_params, 0, sizeof node->op_params);
    std::memcpy(node->op_params, &op, sizeof op);
    node->op = GGML_OP_CUSTOM;
}

// Returns what a node with GGML_OP_CUSTOM runs.
inline CustomOp custom_op_of(const ggml_tensor* node) {
    CustomOp op;
    std::memcpy(&op, node->op_params, sizeof op);
    return op;
}

// Tells whether the CPU backend will compute a node: no other device supports it and can use its
// memory. ggml's scheduler gives nodes to other devices, too, and some of these work in plain
// memory like the CPU (BLAS, ZenDNN, OpenVINO), so the buffer of a node does not tell. Must be
// called before the node is changed.
bool is_of_cpu(const ggml_tensor* node);

}  // namespace entropykv
