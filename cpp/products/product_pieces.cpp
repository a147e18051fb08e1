#include "products/product_pieces.hpp"

#include <algorithm>

namespace entropykv {
namespace {

int parts_of(int n, int size) { return (n + size - 1) / size; }

}  // namespace

int ProductPieces::count(const ProductTable& kernels, int n_rows, int n_tokens) {
    return parts_of(n_rows, kernels.tile_rows) * parts_of(n_tokens, kTileTokens);
}

ProductPieces::ProductPieces(const ProductTable& kernels, const ProductTask& of,
                             const std::byte* rounded_tokens)
    : task(of),
      rounded(rounded_tokens),
      stride_(kernels.of(task.type).token_bytes(task.weights.n_values)),
      tile_rows_(kernels.tile_rows),
      n_tiles_(parts_of(task.weights.n_rows, kernels.tile_rows)),
      n_parts_(parts_of(task.n_tokens, kTileTokens)) {}

// Pieces of one tile have consecutive numbers, so that a thread reads its weights once.
ProductPiece ProductPieces::operator[](int number) const {
    const int first_row = number / n_parts_ * tile_rows_;
    const int first_token = number % n_parts_ * kTileTokens;
    const auto row = static_cast<std::size_t>(first_row);
    const auto token = static_cast<std::size_t>(first_token);
    WeightRows rows = task.weights;
    rows.data += row * rows.stride;
    rows.n_rows = std::min(tile_rows_, rows.n_rows - first_row);
    return {
        rows,
        {rounded + token * stride_, stride_, std::min(kTileTokens, task.n_tokens - first_token)},
        task.out + token * task.out_stride + row};
}

}  // namespace entropykv
