#include "llama/graph_hook.hpp"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>

#include "llama/cache_tensors.hpp"
#include "llama/cpu_nodes.hpp"
#include "llama/custom_op.hpp"
#include "llama/device_batch.hpp"

namespace entropykv {
namespace {

// Counts our ops of a layer: the K write, the V write unless V is a part of K, and the attention of
// every reader.
int ops_of(const LayerShape& shape) { return (shape.latent ? 1 : 2) + shape.readers; }

// Tells whether a tensor is an input of the graph, perhaps in another type or shape.
bool is_input(const ggml_tensor* tensor, const DeviceCopies& copies) {
    while (tensor != nullptr) {
        tensor = copies.source_of(tensor);
        if ((tensor->flags & GGML_TENSOR_FLAG_INPUT) != 0 || copies.is_copied_leaf(tensor))
            return true;
        const bool passes_on = tensor->op == GGML_OP_CPY || tensor->op == GGML_OP_CONT;
        tensor = tensor->view_src != nullptr ? tensor->view_src
                 : passes_on                 ? tensor->src[0]
                                             : nullptr;
    }
    return false;
}

// Tells whether a view has exactly the first values of every row of another view.
bool is_start_of(const ggml_tensor* all, const ggml_tensor* part) {
    if (part->view_offs != all->view_offs || part->ne[0] > all->ne[0]) return false;
    for (int i = 1; i < GGML_MAX_DIMS; ++i)
        if (part->ne[i] != all->ne[i] || part->nb[i] != all->nb[i]) return false;
    return part->nb[0] == all->nb[0];
}

}  // namespace

GraphHook::GraphHook(int relu2_layers, int n_threads, int few_tokens, bool on_devices,
                     const std::string& kernels)
    : on_devices_(on_devices), weights_(relu2_layers, n_threads, few_tokens, kernels) {}

// llama.cpp calls this, so no exception may leave it.
bool GraphHook::on_node(ggml_tensor* node, bool ask, void* user_data) {
    auto* hook = static_cast<GraphHook*>(user_data);
    try {
        if (!ask) {
            if (!hook->attend_instead(node)) hook->times().end(node);
            return true;
        }
        if (hook->devices_ != nullptr) {
            hook->weights_.change(node);
            return hook->change_on_devices(node) || hook->times().begin();
        }
        if (hook->attention_ == nullptr) {
            hook->weights_.change_gate(node);
            return hook->probe(node);
        }
        hook->weights_.change(node);
        hook->change(node);
    } catch (const std::bad_alloc&) {
        hook->fault_ = "there is no memory to look at a graph";
    }
    return hook->times().begin();
}

// The following functions probe a graph.

void GraphHook::refuse(const std::string& why) {
    if (refusal_.empty()) refusal_ = why;
}

void GraphHook::note_obstacle(const std::string& why) {
    if (rope_obstacle_.empty()) rope_obstacle_ = why;
}

bool GraphHook::probe(ggml_tensor* node) {
    copies_.note(node);
    note_order(node);
    if (reads_learned_positions(node)) note_obstacle("its position embeddings are learned");
    if (node->op == GGML_OP_FLASH_ATTN_EXT) probe_attention(node);
    if (node->op == GGML_OP_SET_ROWS) probe_write(node);
    if (node->op == GGML_OP_SOFT_MAX && std::strncmp(node->name, "kq_soft_max", 11) == 0)
        refuse("its attention is not one flash attention node per layer");
    return false;
}

void GraphHook::probe_write(const ggml_tensor* node) {
    const int of_keys = cache_layer_of(node, kCacheK);
    if (of_keys < 0 && cache_layer_of(node, kCacheV) < 0) return;
    if (node->src[0]->type != GGML_TYPE_F32) refuse("its K or V is not computed in f32");
    if (of_keys >= 0) probe_keys(node->src[0], of_keys);
}

void GraphHook::probe_keys(const ggml_tensor* rows, int cache_layer) {
    const RopeSeen rope = probe_rope(rows, copies_);
    if (!rope.obstacle.empty()) note_obstacle(rope.obstacle);
    if (!rope.factors_known) note_obstacle("its RoPE factors are not in memory");
    if (rope.short_factors) rope_limit_ = rope.params.n_ctx_orig;
    keys_.push_back({cache_layer, rope});
}

RopeSeen GraphHook::rope_of(int cache_layer, int head_dim) {
    for (const Keys& keys : keys_) {
        if (keys.cache_layer != cache_layer) continue;
        if (keys.rope.head_dim == head_dim) return keys.rope;
        if (keys.rope.head_dim == 0) return {};
    }
    note_obstacle("its keys are not written as they are attended to");
    return {};
}

void GraphHook::probe_attention(const ggml_tensor* node) {
    const ggml_tensor* q = node->src[0];
    // A device that computes attention in the place of the cache's device gets copies.
    const ggml_tensor* k = copies_.source_of(node->src[1]);
    const ggml_tensor* v = copies_.source_of(node->src[2]);
    const int cache_layer = cache_layer_of(k, kCacheK);
    if (cache_layer < 0) return refuse("a layer attends to something that is not the KV cache");
    const bool latent = cache_layer_of(v, kCacheK) == cache_layer;
    if (latent && !is_start_of(k, v)) return refuse("its V is not the first values of its K");
    if (!latent && cache_layer_of(v, kCacheV) != cache_layer) return refuse("its V is not cached");
    float params[3];
    std::memcpy(params, node->op_params, sizeof params);
    if (!is_input(node->src[3], copies_))
        return refuse("which positions it attends to is computed in its graph");
    if (k->ne[3] != 1 || q->ne[3] != 1) return refuse("it has several streams of K and V");
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float))
        return refuse("its queries are not f32");
    if (k->ne[0] > kMaxHeadDim || v->ne[0] > kMaxHeadDim)
        return refuse("its heads are larger than " + std::to_string(kMaxHeadDim) + " values");
    if (on_devices_) {
        probe_device(node);
    } else if (!is_of_cpu(node) ||
               (k->buffer != nullptr && !ggml_backend_buffer_is_host(k->buffer))) {
        return refuse("its attention is offloaded to a device");
    }
    AttentionNode seen{};
    seen.cache_layer = cache_layer;
    seen.shape = {static_cast<int>(q->ne[2]), static_cast<int>(k->ne[2]),
                  static_cast<int>(k->ne[0]), static_cast<int>(v->ne[0])};
    seen.shape.latent = latent;
    seen.scale = params[0];
    seen.max_bias = params[1];
    seen.softcap = params[2];
    seen.has_sinks = node->src[4] != nullptr;
    const RopeSeen rope = rope_of(cache_layer, seen.shape.k_dim);
    seen.rope = rope.params;
    seen.rope_magnitude = rope.magnitude;
    seen.memory = ggml_backend_buffer_get_type(root_of(k)->buffer);
    seen.is_apart = !is_usable_in(seen.memory, node);
    std::memcpy(seen.op_params.data(), node->op_params, sizeof node->op_params);
    seen.slots = static_cast<int>(slots_of(node).size());
    if (seen.shape.n_head % seen.shape.n_head_kv != 0)
        return refuse("its query heads are no multiple of its KV heads");
    const auto of_layer = [&](const Keys& keys) { return keys.cache_layer == cache_layer; };
    if (std::count_if(keys_.begin(), keys_.end(), of_layer) > 1)
        return refuse("it writes several kinds of keys for one layer");
    for (AttentionNode& first : nodes_)
        if (first.cache_layer == cache_layer) return probe_reader(first, node, seen);
    nodes_.push_back(seen);
    masks_.push_back(node->src[3]);
}

// Refuses what the device store cannot serve yet.
void GraphHook::probe_device(const ggml_tensor* node) {
    const ggml_tensor* k = node->src[1];
    if (k->type != GGML_TYPE_F16 || node->src[2]->type != GGML_TYPE_F16)
        return refuse("its cache is not f16");
}

// Records another layer that attends to the K and V of `first`.
void GraphHook::probe_reader(AttentionNode& first, const ggml_tensor* node,
                             const AttentionNode& seen) {
    const auto number = static_cast<std::size_t>(&first - nodes_.data());
    const LayerShape& a = first.shape;
    const LayerShape& b = seen.shape;
    const bool same = a.n_head == b.n_head && a.n_head_kv == b.n_head_kv && a.k_dim == b.k_dim &&
                      a.v_dim == b.v_dim && a.latent == b.latent && first.scale == seen.scale &&
                      first.softcap == seen.softcap && first.max_bias == seen.max_bias &&
                      masks_[number] == node->src[3];
    if (!same) return refuse("layers that attend to the same K and V do so in different ways");
    ++first.shape.readers;
    first.slots = std::min(first.slots, seen.slots);
    first.has_sinks = first.has_sinks || seen.has_sinks;
}

// The following functions change graphs.

void GraphHook::serve(AttentionBatch& attention) {
    layers_.clear();
    copies_ = {};  // the probe's tensors no longer exist
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
    attention_ = &attention;
}

void GraphHook::serve_on_devices(DeviceBatch& batch) {
    layers_.clear();
    copies_ = {};
    devices_ = &batch;
}

// Notes the order in which nodes are computed.
void GraphHook::note_order(ggml_tensor* node) {
    const bool writes = node->op == GGML_OP_SET_ROWS &&
                        (cache_layer_of(node, kCacheK) >= 0 || cache_layer_of(node, kCacheV) >= 0);
    if (writes) in_order_.clear();
    in_order_.push_back(node);
}

// Returns views that only an attention node reads, of those that are computed after the last write
// and after the queries, in their order.
std::vector<ggml_tensor*> GraphHook::slots_of(const ggml_tensor* attention) const {
    const auto is_view = [](const ggml_tensor* tensor) {
        return tensor->op == GGML_OP_VIEW || tensor->op == GGML_OP_PERMUTE ||
               tensor->op == GGML_OP_RESHAPE;
    };
    const ggml_tensor* queries = attention->src[0];
    while (is_view(queries)) queries = queries->src[0];
    const auto computed = std::find(in_order_.begin(), in_order_.end(), queries);
    const auto first = computed == in_order_.end() ? in_order_.begin() : computed + 1;
    std::vector<const ggml_tensor*> views;
    if (is_view(attention->src[0])) views.push_back(attention->src[0]);
    for (const ggml_tensor* rows : {attention->src[1], attention->src[2]})
        for (; is_view(rows); rows = rows->src[0]) views.push_back(rows);
    std::vector<ggml_tensor*> slots;
    std::copy_if(first, in_order_.end(), std::back_inserter(slots), [&](const ggml_tensor* tensor) {
        return std::find(views.begin(), views.end(), tensor) != views.end();
    });
    return slots;
}

// Tells llama.cpp to stop at attention that is computed between two nodes.
bool GraphHook::change_on_devices(ggml_tensor* node) {
    if (!begun_) {
        begun_ = true;
        devices_->begin(!times().measures());
    }
    if (!devices_->in_graph()) return leave_out(node);
    note_order(node);
    if (node->op == GGML_OP_SET_ROWS) {
        for (const bool keys : {true, false}) {
            const int layer = layer_on_devices(cache_layer_of(node, keys ? kCacheK : kCacheV));
            if (layer >= 0) {
                devices_->change_write(layer, keys, node, changes_);
                break;
            }
        }
    } else if (node->op == GGML_OP_FLASH_ATTN_EXT) {
        const int layer = layer_on_devices(cache_layer_of(node->src[1], kCacheK));
        if (!is_served(layer)) return false;
        if (is_usable_in(nodes_[static_cast<std::size_t>(layer)].memory, node))
            devices_->change_attention(layer, {node->src[0], nullptr, nullptr, node, node->src[4]},
                                       node, slots_of(node), changes_);
        else
            fault_ = "a layer's attention is on another device than its K and V";
    }
    return false;
}

// Returns the number of a layer in the store; -1: it has none.
int GraphHook::layer_on_devices(int cache_layer) const {
    for (std::size_t i = 0; i < nodes_.size(); ++i)
        if (nodes_[i].cache_layer == cache_layer) return static_cast<int>(i);
    return -1;
}

// Counts an attention node, and tells whether its layer is known.
bool GraphHook::is_served(int layer) {
    ++served_;
    if (layer < 0) fault_ = "a graph has an attention node that the first one did not have";
    return layer >= 0;
}

// Makes llama.cpp compute everything up to an attention node, and nothing for the node itself.
bool GraphHook::leave_out(ggml_tensor* node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT) return false;
    node->op = GGML_OP_NONE;
    left_out_ = node;
    return true;
}

// Computes the attention of a node that was left out; returns false for any other node. The node is
// as it was afterwards, since llama.cpp may use its graph again.
bool GraphHook::attend_instead(ggml_tensor* node) {
    if (left_out_ != node || devices_ == nullptr) return false;
    left_out_ = nullptr;
    node->op = GGML_OP_FLASH_ATTN_EXT;
    const int layer = layer_on_devices(cache_layer_of(node->src[1], kCacheK));
    if (is_served(layer))
        devices_->attend(layer, {node->src[0], node->src[1], node->src[2], node, node->src[4]});
    return true;
}

// Returns the entry of the first reader; those of the other readers follow it.
GraphHook::LayerHook* GraphHook::layer_of(int cache_layer) {
    for (LayerHook& layer : layers_)
        if (layer.cache_layer == cache_layer) return &layer;
    return nullptr;
}

void GraphHook::replace(ggml_tensor* node, OpFunction function, const LayerHook& layer) {
    if (!is_of_cpu(node)) {
        fault_ = "a graph has attention that another device than the CPU computes";
        return;
    }
    make_custom(node, function, const_cast<LayerHook*>(&layer));
    ++served_;
}

void GraphHook::change(ggml_tensor* node) {
    if (node->op == GGML_OP_CUSTOM) {  // llama.cpp reused the graph
        const OpFunction function = custom_op_of(node).function;
        if (function == stage_k_op || function == stage_v_op || function == attend_op) ++served_;
        return;
    }
    if (node->op == GGML_OP_SET_ROWS) {
        for (const bool is_k : {true, false}) {
            LayerHook* layer = layer_of(cache_layer_of(node, is_k ? kCacheK : kCacheV));
            if (layer == nullptr) continue;
            release_cells(root_of(node));
            if (is_k) layer->next_reader = 0;
            replace(node, is_k ? stage_k_op : stage_v_op, *layer);
            return;
        }
    } else if (node->op == GGML_OP_FLASH_ATTN_EXT) {
        LayerHook* layer = layer_of(cache_layer_of(node->src[1], kCacheK));
        const int readers =
            layer == nullptr ? 0 : nodes_[static_cast<std::size_t>(layer->layer)].shape.readers;
        if (layer == nullptr || layer->next_reader == readers) {
            fault_ = "a graph has an attention node that the first one did not have";
            return;
        }
        replace(node, attend_op, layer[layer->next_reader++]);
    }
}

void GraphHook::begin_step() {
    changes_.undo();
    in_order_.clear();
    begun_ = false;
    served_ = 0;
    fault_ = nullptr;
    weights_.begin_step();
}

void GraphHook::check_step() {
    changes_.undo();
    if (const char* fault = fault_.load(); fault != nullptr) throw std::runtime_error(fault);
    if (devices_ != nullptr) devices_->check_step();
    int expected = 0;
    for (const AttentionNode& node : nodes_)
        expected += devices_ != nullptr ? node.shape.readers : ops_of(node.shape);
    if (served_ != expected)
        throw std::runtime_error("only " + std::to_string(served_) + " of " +
                                 std::to_string(expected) + " attention nodes were served");
    weights_.check_step();
}

// The following functions are the ops; ggml's threads run them.

namespace {

RowsView written_rows(const ggml_tensor* node, int dim) {
    const ggml_tensor* rows = node->src[0];  // [heads * dim, n_tokens]
    return {static_cast<const std::byte*>(rows->data), rows->nb[1],
            static_cast<std::size_t>(dim) * sizeof(float)};
}

}  // namespace

void GraphHook::stage_k_op(ggml_tensor* node, int thread, int n_threads, void* user_data) {
    const auto* layer = static_cast<const LayerHook*>(user_data);
    GraphHook* hook = layer->hook;
    if (node->src[0]->ne[1] != hook->attention_->n_tokens()) {
        hook->fault_ = "a graph reads another number of tokens than the session gave it";
        return;
    }
    const int dim = hook->nodes_[static_cast<std::size_t>(layer->layer)].shape.k_dim;
    hook->attention_->stage_k(layer->layer, written_rows(node, dim), thread, n_threads);
}

void GraphHook::stage_v_op(ggml_tensor* node, int thread, int n_threads, void* user_data) {
    const auto* layer = static_cast<const LayerHook*>(user_data);
    const GraphHook* hook = layer->hook;
    if (hook->fault_ != nullptr) return;
    const int dim = hook->nodes_[static_cast<std::size_t>(layer->layer)].shape.v_dim;
    hook->attention_->stage_v(layer->layer, written_rows(node, dim), thread, n_threads);
}

void GraphHook::attend_op(ggml_tensor* node, int thread, int, void* user_data) {
    const auto* layer = static_cast<const LayerHook*>(user_data);
    const GraphHook* hook = layer->hook;
    if (hook->fault_ != nullptr || thread >= hook->attention_->n_threads()) return;
    const ggml_tensor* q = node->src[0];  // [dim, n_tokens, n_head]
    const RowsView query{static_cast<const std::byte*>(q->data), q->nb[1], q->nb[2]};
    AttentionParams params = layer->params;
    if (!layer->slopes.empty()) params.slopes = layer->slopes.data();
    if (node->src[4] != nullptr) params.sinks = static_cast<const float*>(node->src[4]->data);
    hook->attention_->attend(layer->layer, layer->reader, params, query,
                             static_cast<float*>(node->data), thread);
}

}  // namespace entropykv
