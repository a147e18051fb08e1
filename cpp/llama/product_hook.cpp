#include "llama/product_hook.hpp"

#include <ggml-backend.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <new>

#include "llama/cpu_nodes.hpp"
#include "llama/custom_op.hpp"

namespace entropykv {
namespace {

std::optional<WeightType> type_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return WeightType::q4_0;
        case GGML_TYPE_Q4_1: return WeightType::q4_1;
        case GGML_TYPE_Q8_0: return WeightType::q8_0;
        case GGML_TYPE_Q4_K: return WeightType::q4_k;
        case GGML_TYPE_Q5_K: return WeightType::q5_k;
        case GGML_TYPE_Q6_K: return WeightType::q6_k;
        case GGML_TYPE_TQ1_0: return WeightType::tq1_0;
        case GGML_TYPE_TQ2_0: return WeightType::tq2_0;
        case GGML_TYPE_Q5_0: return WeightType::q5_0;
        case GGML_TYPE_Q5_1: return WeightType::q5_1;
        case GGML_TYPE_F16: return WeightType::f16;
        default: return std::nullopt;
    }
}

bool is_weight(const ggml_tensor* tensor) {
    return tensor->buffer != nullptr &&
           ggml_backend_buffer_get_usage(tensor->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Excludes memory of devices, and weights that llama.cpp has repacked for itself.
bool in_plain_memory(const ggml_tensor* tensor) {
    return tensor->buffer != nullptr && ggml_backend_buffer_is_host(tensor->buffer);
}

// Tells whether a tensor is one matrix of f32 with contiguous rows.
bool is_matrix(const ggml_tensor* tensor) {
    return tensor->type == GGML_TYPE_F32 && tensor->nb[0] == sizeof(float) &&
           tensor->nb[1] % sizeof(float) == 0 && tensor->ne[2] == 1 && tensor->ne[3] == 1;
}

bool is_served(const ggml_tensor* node) {
    const ggml_tensor* weights = node->src[0];
    const ggml_tensor* tokens = node->src[1];
    constexpr std::int64_t most = std::numeric_limits<int>::max();
    return in_plain_memory(weights) && in_plain_memory(tokens) && is_of_cpu(node) &&
           weights->ne[2] == 1 && weights->ne[3] == 1 &&
           weights->nb[0] == ggml_type_size(weights->type) && is_matrix(tokens) &&
           is_matrix(node) && tokens->ne[1] > 0 && weights->ne[1] <= most && tokens->ne[1] <= most;
}

// For f16, only these kernels are faster than llama.cpp's: see docs/background/products.md.
bool serves_halves(const ProductTable* table) {
    return table != nullptr && std::strcmp(table->name, "avx512vnni") == 0;
}

// This was measured: see docs/background/products.md.
bool stock_is_faster(WeightType type, std::int64_t n_tokens) {
    constexpr int kManyTokens = 16;
    if (type == WeightType::f16) return n_tokens > 1 && n_tokens < kManyTokens;
    return type == WeightType::q6_k && n_tokens == 1;
}

const ProductTable* fastest_products() {
    const auto tables = available_products();
    return tables.empty() ? nullptr : tables.back();
}

// Tells whether a tensor has contiguous f32 values.
bool is_plain_f32(const ggml_tensor* tensor) {
    return tensor->type == GGML_TYPE_F32 && ggml_is_contiguous(tensor) &&
           tensor->buffer != nullptr && ggml_backend_buffer_is_host(tensor->buffer);
}

// Threads share values instead of rows, because one token is a single row.
void scale_op(ggml_tensor* node, int thread, int n_threads, void*) {
    const float scale = *static_cast<const float*>(node->src[1]->data);
    const auto* in = static_cast<const float*>(node->src[0]->data);
    auto* out = static_cast<float*>(node->data);
    const std::int64_t n = ggml_nelements(node);
    const std::int64_t last = n * (thread + 1) / n_threads;
    for (std::int64_t i = n * thread / n_threads; i < last; ++i) out[i] = in[i] * scale;
}

}  // namespace

ProductHook::ProductHook(int n_threads, bool batch_invariant) : batch_invariant_(batch_invariant) {
    const ProductTable* table = fastest_products();
    if (table != nullptr) products_.emplace(*table, n_threads);
    serves_halves_ = serves_halves(table);
}

// If there is no memory, the node is not changed.
bool ProductHook::take(ggml_tensor* node) noexcept {
    const auto type = type_of(node->src[0]->type);
    if (!products_ || !type || !is_served(node)) return false;
    if (*type == WeightType::f16 && !serves_halves_) return false;
    if (!batch_invariant_ && stock_is_faster(*type, node->src[1]->ne[1])) return false;
    try {
        products_->reserve(*type, static_cast<int>(node->src[0]->ne[1]),
                           static_cast<int>(node->src[0]->ne[0]),
                           static_cast<int>(node->src[1]->ne[1]));
    } catch (const std::bad_alloc&) {
        return false;
    }
    make_custom(node, multiply_op, this);
    return true;
}

void ProductHook::change(ggml_tensor* node) noexcept {
    if (node->op != GGML_OP_MUL_MAT || !is_weight(node->src[0])) return;
    if (node->src[1]->ne[1] == 0) return;  // A chunk without logits: nothing is computed.
    Seen& seen = seen_[node->src[0]->type];
    (take(node) ? seen.ours : seen.stock) = true;
}

std::map<std::string, std::string> ProductHook::computed_by() const {
    std::map<std::string, std::string> names;
    for (std::size_t type = 0; type < seen_.size(); ++type) {
        const Seen& seen = seen_[type];
        if (!seen.ours && !seen.stock) continue;
        std::string& name = names[ggml_type_name(static_cast<ggml_type>(type))];
        if (seen.ours) name = products_->kernels_name();
        if (seen.stock) name += seen.ours ? ", llama.cpp" : "llama.cpp";
    }
    return names;
}

void ProductHook::multiply_op(ggml_tensor* node, int thread, int n_threads, void* user_data) {
    const ggml_tensor* weights = node->src[0];
    const ggml_tensor* tokens = node->src[1];
    const ProductTask task{*type_of(weights->type),
                           {static_cast<const std::byte*>(weights->data), weights->nb[1],
                            static_cast<int>(weights->ne[1]), static_cast<int>(weights->ne[0])},
                           static_cast<const float*>(tokens->data),
                           tokens->nb[1] / sizeof(float),
                           static_cast<int>(tokens->ne[1]),
                           static_cast<float*>(node->data),
                           node->nb[1] / sizeof(float)};
    static_cast<ProductHook*>(user_data)->products_->multiply(task, thread, n_threads);
}

bool is_product(const ggml_tensor* node) {
    return node->op == GGML_OP_MUL_MAT ||
           (node->op == GGML_OP_CUSTOM && custom_op_of(node).function == ProductHook::multiply_op);
}

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
