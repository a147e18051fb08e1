#include "products/products.hpp"

#include <algorithm>

#include "platform/instruction_sets.hpp"
#include "platform/relax.hpp"

namespace entropykv {
namespace {

constexpr int kRowStep = 8;  // rows that the kernels take together
// How many bytes of weights a piece of a single token's product has. To take a piece costs as much
// as to read some hundred bytes.
constexpr std::size_t kPieceBytes = 32768;
// If a thread has fewer bytes of weights than this, a single token's product is cut into equal
// parts: it takes so little time that taking pieces would cost more than a thread that is late.
constexpr std::size_t kFewBytes = 524288;

int parts_of(int n, int size) { return (n + size - 1) / size; }

std::size_t size(int i) { return static_cast<std::size_t>(i); }

}  // namespace

std::vector<const ProductTable*> available_products() {
    std::vector<const ProductTable*> tables;
#if defined(ENTROPYKV_X86)
    if (has_avx2()) tables.push_back(&kProductsAvx2);
#if defined(ENTROPYKV_AVX_VNNI)
    if (has_avx_vnni()) tables.push_back(&kProductsAvxVnni);
#endif
    if (has_avx512_vnni()) tables.push_back(&kProductsAvx512Vnni);
#elif defined(ENTROPYKV_ARM64)
    tables.push_back(&kProductsNeon);
    if (has_neon_dot_products()) tables.push_back(&kProductsNeonDot);
#endif
    return tables;
}

Products::Products(const ProductTable& kernels, int n_threads)
    : kernels_(kernels), token_(size(n_threads)), pieces_(n_threads) {
    for (int i = 0; i < n_threads; ++i) tiles_.emplace_back(kernels.tile_bytes);
}

std::size_t Products::scratch_bytes() const {
    std::size_t bytes = rounded_.size();
    for (const AlignedBytes& token : token_) bytes += token.size();
    for (const AlignedBytes& tile : tiles_) bytes += tile.size();
    return helpers_ ? bytes + helpers_->bytes() : bytes;
}

// Helpers must not read what is allocated anew.
void Products::reserve(WeightType type, int n_rows, int n_values, int n_tokens) {
    const std::size_t token = kernels_.of(type).token_bytes(n_values);
    if (n_tokens > 1) {
        const int n_pieces = ProductPieces::count(kernels_, n_rows, n_tokens);
        const bool grows = rounded_.size() < token * size(n_tokens);
        if (!grows && n_pieces <= most_pieces_) return;
        const int helping = helpers_ ? helpers_->awake() : 0;
        if (helping > 0) helpers_->rest();
        if (grows) rounded_ = AlignedBytes(token * size(n_tokens));
        most_pieces_ = std::max(most_pieces_, n_pieces);
        if (helping > 0) helpers_->wake(helping, most_pieces_);
        return;
    }
    for (AlignedBytes& own : token_)
        if (own.size() < token) own = AlignedBytes(token);
}

void Products::help(int n) {
    if (!helpers_ && n > 0) helpers_ = std::make_unique<ProductHelpers>(kernels_);
    if (!helpers_) return;
    if (n > 0)
        helpers_->wake(n, most_pieces_);
    else
        helpers_->rest();
}

void Products::multiply(const ProductTask& task, int thread, int n_threads) noexcept {
    n_threads = std::min(n_threads, this->n_threads());
    if (thread >= n_threads) return;
    if (task.n_tokens == 1) return multiply_one(task, thread, n_threads);
    multiply_many(task, thread, n_threads);
}

void Products::multiply_one(const ProductTask& task, int thread, int n_threads) noexcept {
    const int steps = parts_of(task.weights.n_rows, kRowStep);
    const std::size_t step_bytes = size(kRowStep) * task.weights.stride;
    if (n_threads == 1 || size(steps) * step_bytes < size(n_threads) * kFewBytes)
        return multiply_rows(task, steps * thread / n_threads, steps * (thread + 1) / n_threads,
                             thread, false);
    const int of_piece = std::max(1, static_cast<int>(kPieceBytes / step_bytes));
    const int n_pieces = parts_of(steps, of_piece);
    bool is_rounded = false;
    for (int i = 0; (i = pieces_.take(n_pieces, thread, n_threads)) >= 0; is_rounded = true)
        multiply_rows(task, i * of_piece, std::min(steps, (i + 1) * of_piece), thread, is_rounded);
    pieces_.leave(n_threads);
}

// Multiplies the rows of steps [first, last). Rounding a token takes less time than waiting for
// another thread that does it, so each thread rounds it for itself, before its first piece.
void Products::multiply_rows(const ProductTask& task, int first, int last, int thread,
                             bool is_rounded) noexcept {
    if (first >= last) return;
    const ProductKernels& kernels = kernels_.of(task.type);
    std::byte* rounded = token_[size(thread)].data();
    if (!is_rounded) kernels.quantise(task.tokens, task.weights.n_values, rounded);
    WeightRows rows = task.weights;
    rows.data += size(kRowStep * first) * rows.stride;
    rows.n_rows = std::min(rows.n_rows, kRowStep * last) - kRowStep * first;
    kernels.one(rows, rounded, task.out + kRowStep * first);
}

void Products::multiply_many(const ProductTask& task, int thread, int n_threads) noexcept {
    const ProductKernels& kernels = kernels_.of(task.type);
    const std::size_t stride = kernels.token_bytes(task.weights.n_values);
    for (int t = thread; t < task.n_tokens; t += n_threads)
        kernels.quantise(task.tokens + size(t) * task.token_stride, task.weights.n_values,
                         rounded_.data() + size(t) * stride);
    const ProductPieces pieces(kernels_, task, rounded_.data());
    wait_for_all(n_threads, pieces);
    multiply_pieces(pieces, thread, n_threads);
}

// What helpers have begun and not finished in the end is not waited for, but computed here.
void Products::multiply_pieces(const ProductPieces& pieces, int thread, int n_threads) noexcept {
    if (helped_) helpers_->note_core();
    for (int i = 0; (i = pieces_.take(pieces.size(), thread, n_threads)) >= 0;) {
        if (!helped_ || helpers_->claim(i)) multiply_piece(pieces, i, thread);
        if (helped_) helpers_->collect(pieces);
    }
    pieces_.leave(n_threads);
    if (!helped_) return;
    for (int i = pieces.size() - 1; i >= 0; --i)
        if (helpers_->take_back(pieces, i)) multiply_piece(pieces, i, thread);
}

void Products::multiply_piece(const ProductPieces& pieces, int number, int thread) noexcept {
    const ProductPiece piece = pieces[number];
    kernels_.of(pieces.task.type)
        .many(piece.rows, piece.tokens, tiles_[size(thread)].data(), piece.out,
              pieces.task.out_stride);
}

// The last thread that arrives offers the pieces to helpers and opens the next round.
void Products::wait_for_all(int n_threads, const ProductPieces& pieces) noexcept {
    const unsigned round = rounds_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads) {
        arrived_.store(0, std::memory_order_relaxed);
        helped_ = helpers_ && helpers_->offer(pieces);
        rounds_.store(round + 1, std::memory_order_release);
    } else {
        wait_until([&] { return rounds_.load(std::memory_order_acquire) != round; });
    }
}

}  // namespace entropykv
