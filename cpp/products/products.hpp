// Products of quantised weights on the threads of an op: which of them are ours, who rounds the
// activations, who takes which rows.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "platform/aligned_bytes.hpp"
#include "products/product_kernels.hpp"

namespace entropykv {

// out[token * out_stride + row] = weights[row] . tokens[token]; strides in floats.
struct ProductTask {
    WeightType type;
    WeightRows weights;
    const float* tokens;
    std::size_t token_stride;
    int n_tokens;
    float* out;
    std::size_t out_stride;
};

// Of one context: its ops run one after the other.
class Products {
public:
    // At most n_threads threads take part.
    Products(const ProductTable& kernels, int n_threads);
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    const char* kernels_name() const { return kernels_.name; }
    int n_threads() const { return static_cast<int>(tiles_.size()); }
    std::size_t scratch_bytes() const;

    // Gets the memory for tasks of such a size; no op may be running. Throws std::bad_alloc.
    void reserve(WeightType type, int n_values, int n_tokens);
    // Every thread of an op calls it with the same task and its own number; those beyond
    // n_threads() do nothing. What is computed does not depend on the threads.
    void multiply(const ProductTask& task, int thread, int n_threads) noexcept;

private:
    void multiply_one(const ProductTask& task, int thread, int n_threads) noexcept;
    void multiply_many(const ProductTask& task, int thread, int n_threads) noexcept;
    void multiply_tile(const ProductTask& task, int tile, int first_token, int thread) noexcept;
    void wait_for_all(int n_threads) noexcept;

    const ProductTable& kernels_;
    AlignedBytes rounded_;             // tokens of a task
    std::vector<AlignedBytes> token_;  // of a thread: a single token, rounded
    std::vector<AlignedBytes> tiles_;  // of a thread: a tile of weights and sums
    std::atomic<int> arrived_{0};      // threads that have rounded their tokens
    std::atomic<unsigned> rounds_{0};  // tasks that all threads have rounded their tokens of
    std::atomic<int> next_piece_{0};   // of rows and tokens
};

}  // namespace entropykv
