// Computes products of quantised weights on the threads of an op: decides which kernels are used,
// who rounds the activations, and who takes which rows.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "platform/aligned_bytes.hpp"
#include "platform/stealing_ranges.hpp"
#include "products/product_kernels.hpp"

namespace entropykv {

// Describes out[token * out_stride + row] = weights[row] . tokens[token]; strides are in floats.
struct ProductTask {
    WeightType type;
    WeightRows weights;
    const float* tokens;
    std::size_t token_stride;
    int n_tokens;
    float* out;
    std::size_t out_stride;
};

// Belongs to one context, whose ops run one after the other.
class Products {
public:
    // At most n_threads threads take part in an op.
    Products(const ProductTable& kernels, int n_threads);
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    const char* kernels_name() const { return kernels_.name; }
    int n_threads() const { return static_cast<int>(tiles_.size()); }
    std::size_t scratch_bytes() const;

    // Allocates memory for tasks of this size; no op may be running. Throws std::bad_alloc.
    void reserve(WeightType type, int n_values, int n_tokens);
    // Every thread of an op calls this with the same task and its own number; threads beyond
    // n_threads() do nothing. The results do not depend on the number of threads.
    void multiply(const ProductTask& task, int thread, int n_threads) noexcept;

private:
    void multiply_one(const ProductTask& task, int thread, int n_threads) noexcept;
    void multiply_many(const ProductTask& task, int thread, int n_threads) noexcept;
    void multiply_tile(const ProductTask& task, int tile, int first_token, int thread) noexcept;
    void wait_for_all(int n_threads, int n_pieces) noexcept;

    const ProductTable& kernels_;
    AlignedBytes rounded_;             // rounded tokens of a task
    std::vector<AlignedBytes> token_;  // holds for each thread a single rounded token
    std::vector<AlignedBytes> tiles_;  // holds for each thread a tile of weights and sums
    std::atomic<int> arrived_{0};      // threads that have rounded their tokens
    std::atomic<unsigned> rounds_{0};  // tasks whose tokens all threads have rounded
    StealingRanges pieces_;            // pieces of rows and tokens that threads take
};

}  // namespace entropykv
