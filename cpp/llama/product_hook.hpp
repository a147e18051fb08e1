// Replaces products of quantised and f16 weights in the graphs of a llama_context by ours, where
// our kernels serve them and llama.cpp's kernel is not faster.
#pragma once

#include <ggml.h>

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "products/products.hpp"

namespace entropykv {

// Computes products of a few tokens by llama.cpp's own kernel, each token on its own: its bits do
// not depend on the others. llama.cpp itself takes another kernel for several tokens.
class TokenProducts {
public:
    // Tells whether llama.cpp's kernels can be called.
#if defined(ENTROPYKV_GGML_CPU)
    static constexpr bool kPossible = true;
#else
    static constexpr bool kPossible = false;
#endif
    // At most n_threads threads take part in an op.
    explicit TokenProducts(int n_threads) : rounded_(static_cast<std::size_t>(n_threads)) {}
    TokenProducts(const TokenProducts&) = delete;
    TokenProducts& operator=(const TokenProducts&) = delete;

    // Lets this object, which must live as long as the context, compute a node that multiplies a
    // matrix with tokens. Throws std::bad_alloc.
    void take(ggml_tensor* node);
    std::size_t scratch_bytes() const;

    // Computes a node that take() has changed; ggml calls it.
    static void multiply_op(ggml_tensor* node, int thread, int n_threads, void* user_data);

private:
    std::vector<AlignedBytes> rounded_;  // for each thread, the rounded tokens
};

class ProductHook {
public:
    // n_threads: the most threads of an op. few_tokens: products of up to this many tokens are left
    // to llama.cpp's kernel where that is faster for one; 0: none are, so that the results of
    // a token do not depend on how many are read with it. kernels: a name in
    // available_products(); empty: the fastest ones. Throws std::invalid_argument for another name.
    explicit ProductHook(int n_threads, int few_tokens = 1, const std::string& kernels = "");
    ProductHook(const ProductHook&) = delete;
    ProductHook& operator=(const ProductHook&) = delete;

    // Changes the node if it is a product that our kernels serve.
    void change(ggml_tensor* node) noexcept;

    // Returns what computed the products, by the type of the weights: the name of our kernels,
    // "llama.cpp", or both, for example "avx2, llama.cpp".
    std::map<std::string, std::string> computed_by() const;
    // Lets n more threads help with products, if our kernels compute them: see Products::help().
    void help(int n) {
        if (products_) products_->help(n);
    }
    std::size_t scratch_bytes() const {
        return (products_ ? products_->scratch_bytes() : 0) + stock_.scratch_bytes();
    }

private:
    struct Seen {
        bool ours = false;
        bool stock = false;
    };
    bool stock_is_faster(WeightType type, std::int64_t n_tokens) const {
        return TokenProducts::kPossible && type == WeightType::q6_k && !has_avx512_ &&
               n_tokens <= few_tokens_;
    }
    void take(ggml_tensor* node, Seen& seen);
    static void multiply_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    friend bool is_product(const ggml_tensor* node);

    int few_tokens_;
    bool has_avx512_ = false;
    std::optional<Products> products_;  // unset if the machine can run none of our kernels
    TokenProducts stock_;
    // Says what computed products, by the type of their weights.
    std::array<Seen, GGML_TYPE_COUNT> seen_{};
};

// Tells whether a node is the product of a weight matrix with its inputs, replaced or not.
bool is_product(const ggml_tensor* node);

// Replaces a node that multiplies f32 values with one number, the scale of a whole matrix of
// ternary weights. llama.cpp calls a function for each value of such a node, which took a seventh
// of the time of reading 8 tokens with a 2B BitNet. Ours gives the same bits.
void change_scaling(ggml_tensor* node);

// Tells whether change_scaling() replaced the node.
bool is_scaling(const ggml_tensor* node);

}  // namespace entropykv
