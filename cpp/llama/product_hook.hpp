// Products of quantised weights in the graphs of a llama_context: nodes whose weights are of a type
// and a shape that our kernels serve faster are computed by them, all others by llama.cpp.
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
    // At most n_threads threads take part in an op. in_company: tokens of several sequences are
    // read together, and a single one must get the bits that it gets beside others.
    explicit ProductHook(int n_threads, bool in_company = false);
    ProductHook(const ProductHook&) = delete;
    ProductHook& operator=(const ProductHook&) = delete;

    // Changes the node if it is a product that is served.
    void change(ggml_tensor* node) noexcept;

    // Who computes products of the types of weights that were seen: the name of our kernels,
    // "llama.cpp", or both, such as "avx2, llama.cpp".
    std::map<std::string, std::string> computed_by() const;
    std::size_t scratch_bytes() const { return products_ ? products_->scratch_bytes() : 0; }

private:
    struct Seen {
        bool ours = false;
        bool stock = false;
    };
    bool take(ggml_tensor* node) noexcept;
    static void multiply_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    friend bool is_product(const ggml_tensor* node);

    bool in_company_;
    bool serves_halves_ = false;
    std::optional<Products> products_;          // none where the machine has no kernels
    std::array<Seen, GGML_TYPE_COUNT> seen_{};  // by the type of the weights
};

// Whether a node is the product of a matrix with its inputs, by whomever it is computed.
bool is_product(const ggml_tensor* node);

}  // namespace entropykv
