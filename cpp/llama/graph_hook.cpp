#include "llama/graph_hook.hpp"

#include <new>
#include <stdexcept>

#include "llama/device_rewrite.hpp"
#include "llama/graph_nodes.hpp"

namespace entropykv {
namespace {

// Replaces the K and V writes and the attention nodes of all layers by operations of the headwise
// store.
class HeadwiseRewrite : public GraphRewrite {
public:
    // `attention` and `nodes` must outlive the last decode of the context.
    HeadwiseRewrite(AttentionBatch& attention, const std::vector<AttentionNode>& nodes,
                    std::atomic<const char*>& fault);

    bool change(ggml_tensor* node) override;
    int n_expected() const override;

private:
    struct LayerHook {
        HeadwiseRewrite* rewrite;
        int layer;  // number in the store
        int reader;
        int cache_layer;
        AttentionParams params;
        std::vector<float> slopes;  // ALiBi's; empty: none
        int next_reader = 0;        // next reader in the graph; used for the first reader only
    };
    using OpFunction = void (*)(ggml_tensor*, int, int, void*);

    void replace(ggml_tensor* node, OpFunction function, const LayerHook& layer);
    LayerHook* layer_of(int cache_layer);
    const LayerShape& shape_of(int layer) const {
        return nodes_[static_cast<std::size_t>(layer)].shape;
    }

    static void stage_k_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    static void stage_v_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    static void attend_op(ggml_tensor* node, int thread, int n_threads, void* user_data);

    AttentionBatch& attention_;
    const std::vector<AttentionNode>& nodes_;
    std::vector<LayerHook> layers_;
};

RowsView written_rows(const ggml_tensor* node, int dim) {
    const ggml_tensor* rows = node->src[0];  // [heads * dim, n_tokens]
    return {static_cast<const std::byte*>(rows->data), rows->nb[1],
            static_cast<std::size_t>(dim) * sizeof(float)};
}

HeadwiseRewrite::HeadwiseRewrite(AttentionBatch& attention, const std::vector<AttentionNode>& nodes,
                                 std::atomic<const char*>& fault)
    : GraphRewrite(fault), attention_(attention), nodes_(nodes) {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
        AttentionParams params;
        params.scale = nodes_[i].scale;
        params.softcap = nodes_[i].softcap;
        const float max_bias = nodes_[i].max_bias;
        for (int reader = 0; reader < nodes_[i].shape.readers; ++reader)
            layers_.push_back({this, static_cast<int>(i), reader, nodes_[i].cache_layer, params,
                               max_bias > 0.0f ? alibi_slopes(nodes_[i].shape.n_head, max_bias)
                                               : std::vector<float>{}});
    }
}

// Counts the K writes, the V writes unless V is a part of K, and the attention of every reader.
int HeadwiseRewrite::n_expected() const {
    int n = 0;
    for (const AttentionNode& node : nodes_) n += (node.shape.latent ? 1 : 2) + node.shape.readers;
    return n;
}

// Returns the entry of the first reader; those of the other readers follow it.
HeadwiseRewrite::LayerHook* HeadwiseRewrite::layer_of(int cache_layer) {
    for (LayerHook& layer : layers_)
        if (layer.cache_layer == cache_layer) return &layer;
    return nullptr;
}

void HeadwiseRewrite::replace(ggml_tensor* node, OpFunction function, const LayerHook& layer) {
    if (!is_of_cpu(node)) {
        fault_ = "a graph has attention that another device than the CPU computes";
        return;
    }
    make_custom(node, function, const_cast<LayerHook*>(&layer));
    ++served_;
}

bool HeadwiseRewrite::change(ggml_tensor* node) {
    if (node->op == GGML_OP_CUSTOM) {  // llama.cpp reused the graph
        const OpFunction function = custom_op_of(node).function;
        if (function == stage_k_op || function == stage_v_op || function == attend_op) ++served_;
        return false;
    }
    if (node->op == GGML_OP_SET_ROWS) {
        for (const bool is_k : {true, false}) {
            LayerHook* layer = layer_of(cache_layer_of(node, is_k ? kCacheK : kCacheV));
            if (layer == nullptr) continue;
            release_cells(root_of(node));
            if (is_k) layer->next_reader = 0;
            replace(node, is_k ? stage_k_op : stage_v_op, *layer);
            break;
        }
    } else if (node->op == GGML_OP_FLASH_ATTN_EXT) {
        LayerHook* layer = layer_of(cache_layer_of(node->src[1], kCacheK));
        const int readers = layer == nullptr ? 0 : shape_of(layer->layer).readers;
        if (layer == nullptr || layer->next_reader == readers) {
            fault_ = kUnknownNode;
            return false;
        }
        replace(node, attend_op, layer[layer->next_reader++]);
    }
    return false;
}

// The following functions replace operations of llama.cpp's graph; ggml's threads run them.

void HeadwiseRewrite::stage_k_op(ggml_tensor* node, int thread, int n_threads, void* user_data) {
    const auto* layer = static_cast<const LayerHook*>(user_data);
    const HeadwiseRewrite* of = layer->rewrite;
    if (node->src[0]->ne[1] != of->attention_.n_tokens()) {
        of->fault_ = "a graph reads another number of tokens than the session gave it";
        return;
    }
    const int dim = of->shape_of(layer->layer).k_dim;
    of->attention_.stage_k(layer->layer, written_rows(node, dim), thread, n_threads);
}

void HeadwiseRewrite::stage_v_op(ggml_tensor* node, int thread, int n_threads, void* user_data) {
    const auto* layer = static_cast<const LayerHook*>(user_data);
    const HeadwiseRewrite* of = layer->rewrite;
    if (of->fault_ != nullptr) return;
    const int dim = of->shape_of(layer->layer).v_dim;
    of->attention_.stage_v(layer->layer, written_rows(node, dim), thread, n_threads);
}

void HeadwiseRewrite::attend_op(ggml_tensor* node, int thread, int, void* user_data) {
    const auto* layer = static_cast<const LayerHook*>(user_data);
    const HeadwiseRewrite* of = layer->rewrite;
    if (of->fault_ != nullptr || thread >= of->attention_.n_threads()) return;
    const ggml_tensor* q = node->src[0];  // [dim, n_tokens, n_head]
    const RowsView query{static_cast<const std::byte*>(q->data), q->nb[1], q->nb[2]};
    AttentionParams params = layer->params;
    if (!layer->slopes.empty()) params.slopes = layer->slopes.data();
    if (node->src[4] != nullptr) params.sinks = static_cast<const float*>(node->src[4]->data);
    of->attention_.attend(layer->layer, layer->reader, params, query,
                          static_cast<float*>(node->data), thread);
}

}  // namespace

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
    if (const char* fault = fault_.load(); fault != nullptr) throw GraphError(fault);
    if (rewrite_ != nullptr) {
        rewrite_->check_step();
        if (rewrite_->n_served() != rewrite_->n_expected())
            throw GraphError("only " + std::to_string(rewrite_->n_served()) + " of " +
                             std::to_string(rewrite_->n_expected()) +
                             " attention nodes were served");
    }
    weights_.check_step();
}

}  // namespace entropykv
