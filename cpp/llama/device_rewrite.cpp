#include "llama/device_rewrite.hpp"

#include "llama/device_batch.hpp"
#include "llama/graph_nodes.hpp"

namespace entropykv {

void DeviceRewrite::begin_step() {
    GraphRewrite::begin_step();
    changes_.undo();
    order_.clear();
    begun_ = false;
}

// Tells llama.cpp to stop at attention that is computed between two nodes.
bool DeviceRewrite::change(ggml_tensor* node) {
    if (!begun_) {
        begun_ = true;
        batch_.begin(!times_.measures());
    }
    if (!batch_.in_graph()) return leave_out(node);
    order_.note(node);
    if (node->op == GGML_OP_SET_ROWS) {
        for (const bool keys : {true, false}) {
            const int layer = layer_of(cache_layer_of(node, keys ? kCacheK : kCacheV));
            if (layer >= 0) {
                batch_.change_write(layer, keys, node, changes_);
                break;
            }
        }
    } else if (node->op == GGML_OP_FLASH_ATTN_EXT) {
        const int layer = layer_of(cache_layer_of(node->src[1], kCacheK));
        if (!is_served(layer)) return false;
        if (is_usable_in(nodes_[static_cast<std::size_t>(layer)].memory, node))
            batch_.change_attention(layer, {node->src[0], nullptr, nullptr, node, node->src[4]},
                                    node, order_.slots_of(node), changes_);
        else
            fault_ = "a layer's attention is on another device than its K and V";
    }
    return false;
}

// Returns the number of a layer in the store; -1: it has none.
int DeviceRewrite::layer_of(int cache_layer) const {
    for (std::size_t i = 0; i < nodes_.size(); ++i)
        if (nodes_[i].cache_layer == cache_layer) return static_cast<int>(i);
    return -1;
}

// Counts an attention node, and tells whether its layer is known.
bool DeviceRewrite::is_served(int layer) {
    ++served_;
    if (layer < 0) fault_ = kUnknownNode;
    return layer >= 0;
}

// Makes llama.cpp compute everything up to an attention node, and nothing for the node itself.
bool DeviceRewrite::leave_out(ggml_tensor* node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT) return false;
    node->op = GGML_OP_NONE;
    left_out_ = node;
    return true;
}

// Computes the attention of a node that was left out; returns false for any other node. The node is
// as it was afterwards, since llama.cpp may use its graph again.
bool DeviceRewrite::attend_instead(ggml_tensor* node) {
    if (left_out_ != node) return false;
    left_out_ = nullptr;
    node->op = GGML_OP_FLASH_ATTN_EXT;
    const int layer = layer_of(cache_layer_of(node->src[1], kCacheK));
    if (is_served(layer))
        batch_.attend(layer, {node->src[0], node->src[1], node->src[2], node, node->src[4]});
    return true;
}

void DeviceRewrite::check_step() { batch_.check_step(); }

int DeviceRewrite::n_expected() const {
    int n = 0;
    for (const AttentionNode& node : nodes_) n += node.shape.readers;
    return n;
}

}  // namespace entropykv
