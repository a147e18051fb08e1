// Reads the nodes of llama.cpp's graphs, and turns some into custom ops: functions of ours, which
// run on ggml's threads and find the sources of the node unchanged. Only the CPU backend can run
// them; if another device got one, the process would abort. When llama.cpp reuses a graph, changed
// nodes stay changed.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "platform/system_memory.hpp"

namespace entropykv {

// Thrown if a graph is not as the first one that was probed.
struct GraphError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// llama.cpp's cache has one tensor of each kind for every layer; their names begin like this.
constexpr const char* kCacheK = "cache_k_l";
constexpr const char* kCacheV = "cache_v_l";

inline const ggml_tensor* root_of(const ggml_tensor* tensor) {
    while (tensor->view_src != nullptr) tensor = tensor->view_src;
    return tensor;
}

// Returns N if the tensor is a view of the one that is named <prefix>N, or of its copy on another
// device, which is named "<device>#<name>#<number>"; otherwise -1.
inline int cache_layer_of(const ggml_tensor* tensor, const char* prefix) {
    if (tensor == nullptr) return -1;
    const char* name = root_of(tensor)->name;
    if (const char* mark = std::strchr(name, '#'); mark != nullptr) name = mark + 1;
    const std::size_t length = std::strlen(prefix);
    return std::strncmp(name, prefix, length) == 0 ? std::atoi(name + length) : -1;
}

// Gives the memory of llama.cpp's cache cells back to the system, once our nodes have replaced all
// reads and writes of them. Nothing reads them any more, so that their content does not matter.
inline void release_cells(const ggml_tensor* cache) {
    discard_memory(cache->data, ggml_nbytes(cache));
}

// Copies ggml_custom_op_params of ggml-impl.h, which no public header declares.
struct CustomOp {
    ggml_custom_op_t function;
    int n_tasks;
    void* user_data;
};
static_assert(sizeof(CustomOp) <= GGML_MAX_OP_PARAMS, "a custom op must fit into op_params");

// Turns a node into a custom operation, whose function all threads run. `user_data` must live as
// long as the llama.cpp context.
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

// Records the order in which llama.cpp computes the nodes of a layer, from the last write of K or V
// on.
class NodeOrder {
public:
    // Must be called for every node of the graph, in the order of the graph.
    void note(ggml_tensor* node);
    // Returns, in their order, the views that only an attention node reads and that are computed
    // after the last write of K or V and after the queries. Views compute nothing, so they can
    // become other nodes.
    std::vector<ggml_tensor*> slots_of(const ggml_tensor* attention) const;
    void clear() { nodes_.clear(); }

private:
    std::vector<ggml_tensor*> nodes_;
};

}  // namespace entropykv
