#include "llama/attention_probe.hpp"

#include <algorithm>
#include <cstring>

#include "llama/device.hpp"
#include "llama/graph_nodes.hpp"

namespace entropykv {
namespace {

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

void AttentionProbe::refuse(const std::string& why) {
    if (refusal_.empty()) refusal_ = why;
}

void AttentionProbe::note_obstacle(const std::string& why) {
    if (rope_obstacle_.empty()) rope_obstacle_ = why;
}

void AttentionProbe::look_at(ggml_tensor* node) {
    copies_.note(node);
    order_.note(node);
    if (reads_learned_positions(node)) note_obstacle("its position embeddings are learned");
    if (node->op == GGML_OP_FLASH_ATTN_EXT) probe_attention(node);
    if (node->op == GGML_OP_SET_ROWS) probe_write(node);
    if (node->op == GGML_OP_SOFT_MAX && std::strncmp(node->name, "kq_soft_max", 11) == 0)
        refuse("its attention is not one flash attention node per layer");
}

void AttentionProbe::probe_write(const ggml_tensor* node) {
    const int of_keys = cache_layer_of(node, kCacheK);
    if (of_keys < 0 && cache_layer_of(node, kCacheV) < 0) return;
    if (node->src[0]->type != GGML_TYPE_F32) refuse("its K or V is not computed in f32");
    if (of_keys >= 0) probe_keys(node->src[0], of_keys);
}

void AttentionProbe::probe_keys(const ggml_tensor* rows, int cache_layer) {
    const RopeSeen rope = probe_rope(rows, copies_);
    if (!rope.obstacle.empty()) note_obstacle(rope.obstacle);
    if (!rope.factors_known) note_obstacle("its RoPE factors are not in memory");
    if (rope.short_factors) rope_limit_ = rope.params.n_ctx_orig;
    keys_.push_back({cache_layer, rope});
}

RopeSeen AttentionProbe::rope_of(int cache_layer, int head_dim) {
    for (const Keys& keys : keys_) {
        if (keys.cache_layer != cache_layer) continue;
        if (keys.rope.head_dim == head_dim) return keys.rope;
        if (keys.rope.head_dim == 0) return {};
    }
    note_obstacle("its keys are not written as they are attended to");
    return {};
}

void AttentionProbe::probe_attention(const ggml_tensor* node) {
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
    seen.slots = static_cast<int>(order_.slots_of(node).size());
    seen.dense_queries = q->nb[2] == q->nb[0] * static_cast<std::size_t>(q->ne[0]) &&
                         q->nb[1] == q->nb[2] * static_cast<std::size_t>(q->ne[2]);
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

void AttentionProbe::probe_device(const ggml_tensor* node) {
    const ggml_tensor* k = node->src[1];
    if (k->type != GGML_TYPE_F16 || node->src[2]->type != GGML_TYPE_F16)
        return refuse("its cache is not f16");
}

// Records another layer that attends to the K and V of `first`; refuses it if it attends in another
// way.
void AttentionProbe::probe_reader(AttentionNode& first, const ggml_tensor* node,
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
    first.dense_queries = first.dense_queries && seen.dense_queries;
    first.has_sinks = first.has_sinks || seen.has_sinks;
}

void AttentionProbe::end() {
    copies_ = {};
    order_.clear();
    masks_.clear();
}

}  // namespace entropykv
