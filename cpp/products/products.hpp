// Computes products of weights on the threads of an op: decides which kernels are used,
// who rounds the activations, and who takes which rows.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "platform/aligned_bytes.hpp"
#include "platform/stealing_ranges.hpp"
#include "products/product_helpers.hpp"
#include "products/product_kernels.hpp"

namespace entropykv {

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

    // Allocates memory for tasks of up to this size; no op may be running. Throws std::bad_alloc.
    void reserve(WeightType type, int n_rows, int n_values, int n_tokens);
    // Lets n threads help with products of several tokens until help(0); the threads of an op do
    // not wait for them. No op may be running. After help(0), no helper reads weights any more.
    // Throws std::bad_alloc.
    void help(int n);
    // Every thread of an op calls this with the same task and its own number; threads beyond
    // n_threads() do nothing. The results do not depend on the number of threads.
    void multiply(const ProductTask& task, int thread, int n_threads) noexcept;

private:
    void multiply_one(const ProductTask& task, int thread, int n_threads) noexcept;
    void multiply_rows(const ProductTask& task, int first, int last, int thread,
                       bool is_rounded) noexcept;
    void multiply_many(const ProductTask& task, int thread, int n_threads) noexcept;
    void multiply_pieces(const ProductPieces& pieces, int thread, int n_threads) noexcept;
    void multiply_piece(const ProductPieces& pieces, int number, int thread) noexcept;
    void wait_for_all(int n_threads, const ProductPieces& pieces) noexcept;

    const ProductTable& kernels_;
    AlignedBytes rounded_;             // rounded activations of a task
    std::vector<AlignedBytes> token_;  // for each thread, a single rounded token
    std::vector<AlignedBytes> tiles_;  // for each thread, a tile of weights and sums
    std::atomic<int> arrived_{0};      // threads that have rounded their tokens
    std::atomic<unsigned> rounds_{0};  // tasks whose tokens all threads have rounded
    StealingRanges pieces_;            // pieces of rows and tokens that threads take
    int most_pieces_ = 0;              // most pieces of a task
    bool helped_ = false;              // whether helpers may take pieces of the current task
    std::unique_ptr<ProductHelpers> helpers_;  // unset until help() was called
};

}  // namespace entropykv
