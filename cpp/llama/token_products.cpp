#include "llama/token_products.hpp"

#include <ggml-cpu.h>

#include <algorithm>
#include <cstdint>

#include "llama/custom_op.hpp"

namespace entropykv {

std::size_t TokenProducts::scratch_bytes() const {
    std::size_t bytes = 0;
    for (const AlignedBytes& own : rounded_) bytes += own.size();
    return bytes;
}

#if defined(ENTROPYKV_GGML_CPU)
namespace {

// Returns the bytes of a token as the kernel for such weights reads it.
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
