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

void DeviceRewrite::begin() {
    begun_ = true;
    n_repeated_ = 0;
    const bool same = batch_.begin(!times_.measures());
    repeats_ = same && is_whole_;
    if (!repeats_) make_anew();
}

void DeviceRewrite::make_anew() {
    repeats_ = is_whole_ = false;
    seen_.clear();
    changes_.forget();
    batch_.begin_nodes();
}

// Tells llama.cpp to stop at attention that is computed between two nodes.
bool DeviceRewrite::change(ggml_tensor* node) {
    if (!begun_) begin();
    if (!batch_.in_graph()) return leave_out(node);
    const bool is_other = node->op != GGML_OP_SET_ROWS && node->op != GGML_OP_FLASH_ATTN_EXT;
    if (repeats_ && (is_other || repeat(node))) return false;
    order_.note(node);
    if (is_other) return false;
    const void* source = node->src[0]->data;
    const int attends = change_anew(node);
    seen_.push_back({node, source, attends, changes_.size()});
    return false;
}

// Changes a node as in the last step. Returns false if this is another graph than then.
bool DeviceRewrite::repeat(const ggml_tensor* node) {
    const bool is_next = n_repeated_ < seen_.size() && seen_[n_repeated_].node == node &&
                         seen_[n_repeated_].source == node->src[0]->data;
    if (is_next && changes_.repeat(seen_[n_repeated_].n_changes)) {
        const Seen& seen = seen_[n_repeated_++];
        if (seen.attends >= 0) {
            ++served_;
            batch_.note_changed(seen.attends);
        }
        return true;
    }
    if (n_repeated_ == 0) {
        make_anew();
        return false;
    }
    fault_ = "a graph is another one than in the last step, from one of its layers on";
    return true;
}

// Changes a node if it writes or reads the cache. Returns the number of the layer whose attention
// it computes; -1: none.
int DeviceRewrite::change_anew(ggml_tensor* node) {
    if (node->op == GGML_OP_SET_ROWS) {
        for (const bool keys : {true, false}) {
            const int layer = layer_of(cache_layer_of(node, keys ? kCacheK : kCacheV));
            if (layer >= 0) {
                batch_.change_write(layer, keys, node, changes_);
                break;
            }
        }
        return -1;
    }
    const int layer = layer_of(cache_layer_of(node->src[1], kCacheK));
    if (!is_served(layer)) return -1;
    if (is_usable_in(nodes_[static_cast<std::size_t>(layer)].memory, node))
        batch_.change_attention(layer, {node->src[0], nullptr, nullptr, node, node->src[4]}, node,
                                order_.slots_of(node), changes_);
    else
        fault_ = "a layer's attention is on another device than its K and V";
    return layer;
}

void DeviceRewrite::end_step() {
    changes_.undo();
    is_whole_ = batch_.in_graph() && served_ == n_expected() && fault_ == nullptr;
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

// Computes the attention of a node that was left out; returns false for any other node. Afterwards
// the node is unchanged, because llama.cpp may use its graph again.
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
