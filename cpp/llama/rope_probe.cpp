#include "llama/rope_probe.hpp"

#include <ggml-backend.h>
#include <ggml.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "llama/graph_nodes.hpp"

namespace entropykv {
namespace {

constexpr int kMostNodes = 64;  // most nodes that are searched between a projection and the cache
constexpr const char* kChangedAfterwards = "its keys are changed after their rotation";

bool starts_with(const char* text, const char* prefix) {
    return std::strncmp(text, prefix, std::strlen(prefix)) == 0;
}

bool is_reshape(const ggml_tensor* node) {
    if (node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE) return false;
    const ggml_tensor* source = node->src[0];
    return ggml_is_contiguous(node) && ggml_is_contiguous(source) &&
           ggml_nelements(node) == ggml_nelements(source);
}

bool is_weight(const ggml_tensor* tensor) {
    return tensor->op == GGML_OP_NONE && tensor->buffer != nullptr &&
           ggml_backend_buffer_get_usage(tensor->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Tells whether there is a RoPE node between a tensor and the projections it comes from. Counts
// the searched nodes down in `left`, and also returns true if that falls below 0.
bool has_rope_behind(const ggml_tensor* tensor, const DeviceCopies& copies, int& left) {
    tensor = copies.source_of(tensor);
    if (tensor == nullptr || tensor->op == GGML_OP_NONE) return false;
    if (tensor->op == GGML_OP_MUL_MAT && is_weight(tensor->src[0])) return false;
    if (tensor->op == GGML_OP_ROPE || --left < 0) return true;
    for (const ggml_tensor* source : tensor->src)
        if (has_rope_behind(source, copies, left)) return true;
    return false;
}

RopeSeen obstacle(const char* why) {
    RopeSeen seen;
    seen.obstacle = why;
    return seen;
}

// Reads op_params as ggml_rope_impl writes them: n_dims, mode, n_ctx_orig, and from index 5 on
// floats.
RopeSeen read_rope(const ggml_tensor* node, const DeviceCopies& copies) {
    int integers[16];
    float floats[6];
    static_assert(sizeof integers <= GGML_MAX_OP_PARAMS);
    std::memcpy(integers, node->op_params, sizeof integers);
    std::memcpy(floats, node->op_params + 5, sizeof floats);
    if (integers[2] != GGML_ROPE_TYPE_NORMAL && integers[2] != GGML_ROPE_TYPE_NEOX)
        return obstacle("its positions have several dimensions");
    if (copies.source_of(node->src[1])->op != GGML_OP_NONE)
        return obstacle("its positions are computed");
    RopeSeen seen;
    seen.head_dim = static_cast<int>(node->ne[0]);
    seen.params.n_dims = integers[1];
    seen.params.neox = integers[2] == GGML_ROPE_TYPE_NEOX;
    seen.params.n_ctx_orig = integers[4];
    seen.params.offset = integers[15];
    seen.params.freq_base = floats[0];
    seen.params.freq_scale = floats[1];
    seen.params.ext_factor = floats[2];
    seen.params.beta_fast = floats[4];
    seen.params.beta_slow = floats[5];
    // This is the formula of rope_yarn in ggml.
    seen.magnitude = floats[3];
    if (seen.params.ext_factor != 0.0f)
        seen.magnitude *= 1.0f - 0.1f * std::log(seen.params.freq_scale);
    const ggml_tensor* factors = node->src[2];
    if (factors == nullptr) return seen;
    seen.factors_known = is_weight(factors);
    if (!seen.factors_known) return seen;
    std::vector<float>& values = seen.params.freq_factors;
    values.resize(static_cast<std::size_t>(seen.params.n_dims / 2));
    ggml_backend_tensor_get(factors, values.data(), 0, values.size() * sizeof(float));
    seen.short_factors = starts_with(factors->name, "rope_factors_short");
    return seen;
}

const ggml_tensor* without_reshapes(const ggml_tensor* node, const DeviceCopies& copies) {
    for (node = copies.source_of(node); is_reshape(node);) node = copies.source_of(node->src[0]);
    return node;
}

// Reads keys that consist of two parts, the second of which is rotated (multi-head latent
// attention).
RopeSeen read_joined(const ggml_tensor* keys, const DeviceCopies& copies) {
    const ggml_tensor* rotated = without_reshapes(keys->src[1], copies);
    int left = kMostNodes;
    if (keys->op_params[0] != 0 || rotated->op != GGML_OP_ROPE ||
        has_rope_behind(keys->src[0], copies, left))
        return obstacle(kChangedAfterwards);
    RopeSeen seen = read_rope(rotated, copies);
    if (!seen.obstacle.empty()) return seen;
    if (seen.head_dim != keys->src[1]->ne[0]) return obstacle(kChangedAfterwards);
    seen.params.offset += static_cast<int>(keys->src[0]->ne[0]);
    seen.head_dim = static_cast<int>(keys->ne[0]);
    seen.of_part = true;
    return seen;
}

}  // namespace

RopeSeen probe_rope(const ggml_tensor* rows, const DeviceCopies& copies) {
    const ggml_tensor* keys = without_reshapes(rows, copies);
    if (keys->op == GGML_OP_ROPE) return read_rope(keys, copies);
    int left = kMostNodes;
    if (!has_rope_behind(keys, copies, left)) return {};
    return keys->op == GGML_OP_CONCAT ? read_joined(keys, copies) : obstacle(kChangedAfterwards);
}

bool reads_learned_positions(const ggml_tensor* node) {
    return node->op == GGML_OP_GET_ROWS && starts_with(node->src[0]->name, "position_embd");
}

bool KShiftProbe::on_node(ggml_tensor* node, bool ask, void* user_data) {
    if (ask) static_cast<KShiftProbe*>(user_data)->probe(node);
    return !ask;
}

void KShiftProbe::probe(const ggml_tensor* node) {
    copies_.note(node);
    if (reads_learned_positions(node)) obstacle_ = "its position embeddings are learned";
    if (node->op != GGML_OP_SET_ROWS || cache_layer_of(node, kCacheK) < 0) return;
    const RopeSeen rope = probe_rope(node->src[0], copies_);
    if (!rope.obstacle.empty()) obstacle_ = rope.obstacle;
    if (rope.of_part) obstacle_ = kChangedAfterwards;
    if (std::abs(rope.magnitude - 1.0f) > 1e-3f)
        obstacle_ = "llama.cpp would scale its keys again with every rotation";
    ++(rope.head_dim > 0 ? rotated_ : unrotated_);
}

std::string KShiftProbe::obstacle() const {
    if (obstacle_.empty() && rotated_ > 0 && unrotated_ > 0)
        return "llama.cpp would rotate keys that have no position";
    return obstacle_;
}

}  // namespace entropykv
