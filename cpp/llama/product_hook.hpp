// Replaces products of quantised weights in the graphs of a llama_context by ours, if the type and
// shape of the weights are among those for which our kernels are faster.
#pragma once

#include <ggml.h>

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <string>

#include "products/products.hpp"

namespace entropykv {

class ProductHook {
public:
    // n_threads: the most threads of an op. batch_invariant: tokens of several sequences are read
    // together, so a token must get the same bits alone as beside others.
    explicit ProductHook(int n_threads, bool batch_invariant = false);
    ProductHook(const ProductHook&) = delete;
    ProductHook& operator=(const ProductHook&) = delete;

    // Changes the node if it is a product that our kernels serve.
    void change(ggml_tensor* node) noexcept;

    // Returns what computed the products, by the type of the weights: the name of our kernels,
    // "llama.cpp", or both, for example "avx2, llama.cpp".
    std::map<std::string, std::string> computed_by() const;
    // See Products::help().
    void help(int n) {
        if (products_) products_->help(n);
    }
    std::size_t scratch_bytes() const { return products_ ? products_->scratch_bytes() : 0; }

private:
    struct Seen {
        bool ours = false;
        bool stock = false;
    };
    bool take(ggml_tensor* node) noexcept;
    static void multiply_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    friend bool is_product(const ggml_tensor* node);

    bool batch_invariant_;
    bool serves_halves_ = false;
    std::optional<Products> products_;  // unset if the machine can run none of our kernels
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
