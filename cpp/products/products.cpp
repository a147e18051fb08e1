#include "products/products.hpp"

#include <algorithm>

#include "platform/relax.hpp"

namespace entropykv {
namespace {

constexpr int kRowStep = 8;  // rows that the kernels take together

int parts_of(int n, int size) { return (n + size - 1) / size; }

std::size_t size(int i) { return static_cast<std::size_t>(i); }

}  // namespace

Products::Products(const ProductTable& kernels, int n_threads)
    : kernels_(kernels), token_(size(n_threads)), pieces_(n_threads) {
    for (int i = 0; i < n_threads; ++i) tiles_.emplace_back(kernels.tile_bytes);
}

std::size_t Products::scratch_bytes() const {
    std::size_t bytes = rounded_.size();
    for (const AlignedBytes& token : token_) bytes += token.size();
    for (const AlignedBytes& tile : tiles_) bytes += tile.size();
    return bytes;
}

void Products::reserve(WeightType type, int n_values, int n_tokens) {
    const std::size_t token = kernels_.of(type).token_bytes(n_values);
    if (n_tokens > 1) {
        if (rounded_.size() < token * size(n_tokens))
            rounded_ = AlignedBytes(token * size(n_tokens));
        return;
    }
    for (AlignedBytes& own : token_)
        if (own.size() < token) own = AlignedBytes(token);
}

void Products::multiply(const ProductTask& task, int thread, int n_threads) noexcept {
    n_threads = std::min(n_threads, this->n_threads());
    if (thread >= n_threads) return;
    if (task.n_tokens == 1) return multiply_one(task, thread, n_threads);
    multiply_many(task, thread, n_threads);
}

// Rounding a token takes less time than waiting for another thread that does it, so each thread
// rounds it for itself.
void Products::multiply_one(const ProductTask& task, int thread, int n_threads) noexcept {
    const ProductKernels& kernels = kernels_.of(task.type);
    const int steps = parts_of(task.weights.n_rows, kRowStep);
    const int first = kRowStep * (steps * thread / n_threads);
    const int last = std::min(task.weights.n_rows, kRowStep * (steps * (thread + 1) / n_threads));
    if (first >= last) return;
    std::byte* rounded = token_[size(thread)].data();
    kernels.quantise(task.tokens, task.weights.n_values, rounded);
    WeightRows rows = task.weights;
    rows.data += size(first) * rows.stride;
    rows.n_rows = last - first;
    kernels.one(rows, rounded, task.out + first);
}

void Products::multiply_many(const ProductTask& task, int thread, int n_threads) noexcept {
    const ProductKernels& kernels = kernels_.of(task.type);
    const std::size_t stride = kernels.token_bytes(task.weights.n_values);
    for (int t = thread; t < task.n_tokens; t += n_threads)
        kernels.quantise(task.tokens + size(t) * task.token_stride, task.weights.n_values,
                         rounded_.data() + size(t) * stride);
    const int n_tiles = parts_of(task.weights.n_rows, kernels_.tile_rows);
    const int n_parts = parts_of(task.n_tokens, kTileTokens);
    wait_for_all(n_threads, n_tiles * n_parts);
    for (;;) {
        const int piece = pieces_.take(thread, n_threads);
        if (piece < 0) return;
        multiply_tile(task, piece / n_parts, piece % n_parts * kTileTokens, thread);
    }
}

void Products::multiply_tile(const ProductTask& task, int tile, int first_token,
                             int thread) noexcept {
    const ProductKernels& kernels = kernels_.of(task.type);
    const std::size_t stride = kernels.token_bytes(task.weights.n_values);
    const int first_row = tile * kernels_.tile_rows;
    WeightRows rows = task.weights;
    rows.data += size(first_row) * rows.stride;
    rows.n_rows = std::min(kernels_.tile_rows, rows.n_rows - first_row);
    const RoundedTokens tokens{rounded_.data() + size(first_token) * stride, stride,
                               std::min(kTileTokens, task.n_tokens - first_token)};
    kernels.many(rows, tokens, tiles_[size(thread)].data(),
                 task.out + size(first_token) * task.out_stride + first_row, task.out_stride);
}

// The last thread that arrives deals out the pieces and opens the next round. A thread gets
// consecutive tiles, because the kernels prefetch the tile that follows into its own cache.
void Products::wait_for_all(int n_threads, int n_pieces) noexcept {
    const unsigned round = rounds_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads) {
        arrived_.store(0, std::memory_order_relaxed);
        pieces_.deal(n_pieces, n_threads);
        rounds_.store(round + 1, std::memory_order_release);
    } else {
        wait_until([&] { return rounds_.load(std::memory_order_acquire) != round; });
    }
}

}  // namespace entropykv
