#include "llama/product_hook.hpp"

#include <ggml-backend.h>
#include <ggml-cpu.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#include "llama/graph_nodes.hpp"

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

// Returns the kernels of a name, or the fastest ones; null if the machine can run none.
const ProductTable* products_by(const std::string& name) {
    const auto tables = available_products();
    if (name.empty()) return tables.empty() ? nullptr : tables.back();
    for (const ProductTable* table : tables)
        if (table->name == name) return table;
    throw std::invalid_argument("kernels that this machine does not have");
}

// Tells whether a tensor has contiguous f32 values in memory of the host.
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

ProductHook::ProductHook(int n_threads, int few_tokens, const std::string& kernels)
    : few_tokens_(few_tokens), stock_(n_threads) {
    const ProductTable* table = products_by(kernels);
    if (table == nullptr) return;
    products_.emplace(*table, n_threads);
    has_avx512_ = std::strcmp(table->name, "avx512vnni") == 0;
}

// What is faster was measured: see docs/background/products.md. Throws std::bad_alloc.
void ProductHook::take(ggml_tensor* node, Seen& seen) {
    const auto type = type_of(node->src[0]->type);
    const std::int64_t n_tokens = node->src[1]->ne[1];
    const bool is_served_here =
        products_ && type && is_served(node) && (*type != WeightType::f16 || has_avx512_);
    if (is_served_here && !stock_is_faster(*type, n_tokens)) {
        products_->reserve(*type, static_cast<int>(node->src[0]->ne[1]),
                           static_cast<int>(node->src[0]->ne[0]), static_cast<int>(n_tokens));
        make_custom(node, multiply_op, this);
        seen.ours = true;
        return;
    }
    if (is_served_here) stock_.take(node);
    seen.stock = true;
}

// If there is no memory, the node is not changed.
void ProductHook::change(ggml_tensor* node) noexcept {
    if (node->op != GGML_OP_MUL_MAT || !is_weight(node->src[0])) return;
    if (node->src[1]->ne[1] == 0) return;  // A chunk without logits: nothing is computed.
    Seen& seen = seen_[node->src[0]->type];
    try {
        take(node, seen);
    } catch (const std::bad_alloc&) {
        seen.stock = true;
    }
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
           (node->op == GGML_OP_CUSTOM &&
            (custom_op_of(node).function == ProductHook::multiply_op ||
             custom_op_of(node).function == TokenProducts::multiply_op));
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

std::size_t TokenProducts::scratch_bytes() const {
    std::size_t bytes = 0;
    for (const AlignedBytes& own : rounded_) bytes += own.size();
    return bytes;
}

#if defined(ENTROPYKV_GGML_CPU)
namespace {

// Returns the bytes of a token as llama.cpp's kernel for these weights reads it.
std::size_t token_bytes(const ggml_tensor* weights) {
    return ggml_row_size(ggml_get_type_traits_cpu(weights->type)->vec_dot_type, weights->ne[0]);
}

}  // namespace

void TokenProducts::take(ggml_tensor* node) {
    const std::size_t bytes =
        token_bytes(node->src[0]) * static_cast<std::size_t>(node->src[1]->ne[1]);
    for (AlignedBytes& own : rounded_)
        if (own.size() < bytes) own = AlignedBytes(bytes);
    make_custom(node, multiply_op, this);
}

// Every thread rounds all tokens for itself, which takes less time than waiting for others.
void TokenProducts::multiply_op(ggml_tensor* node, int thread, int n_threads, void* user_data) {
    std::vector<AlignedBytes>& rounded = static_cast<TokenProducts*>(user_data)->rounded_;
    n_threads = std::min(n_threads, static_cast<int>(rounded.size()));
    if (thread >= n_threads) return;
    const ggml_tensor* weights = node->src[0];
    const ggml_tensor* tokens = node->src[1];
    const auto* kernel = ggml_get_type_traits_cpu(weights->type);
    const auto* rounding = ggml_get_type_traits_cpu(kernel->vec_dot_type);
    const std::int64_t n_values = weights->ne[0], n_tokens = tokens->ne[1];
    const std::int64_t first = weights->ne[1] * thread / n_threads;
    const std::int64_t last = weights->ne[1] * (thread + 1) / n_threads;
    const auto at = [](const void* data, std::size_t stride, std::int64_t i) {
        return static_cast<const char*>(data) + stride * static_cast<std::size_t>(i);
    };
    std::byte* own = rounded[static_cast<std::size_t>(thread)].data();
    const std::size_t bytes = token_bytes(weights);
    for (std::int64_t t = 0; first < last && t < n_tokens; ++t)
        rounding->from_float(reinterpret_cast<const float*>(at(tokens->data, tokens->nb[1], t)),
                             own + bytes * static_cast<std::size_t>(t), n_values);
    for (std::int64_t row = first; row < last; ++row)
        for (std::int64_t t = 0; t < n_tokens; ++t) {
            char* out = static_cast<char*>(node->data) + node->nb[1] * static_cast<std::size_t>(t);
            kernel->vec_dot(static_cast<int>(n_values), reinterpret_cast<float*>(out) + row, 0,
                            at(weights->data, weights->nb[1], row), 0, at(own, bytes, t), 0, 1);
        }
}

#else
void TokenProducts::take(ggml_tensor*) {}
void TokenProducts::multiply_op(ggml_tensor*, int, int, void*) {}
#endif

}  // namespace entropykv
