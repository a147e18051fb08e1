// Cuts a product into pieces that threads can take one by one.
#pragma once

#include <cstddef>

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

// Describes a piece of a product: the rows of a tile, and at most kTileTokens tokens.
struct ProductPiece {
    WeightRows rows;
    RoundedTokens tokens;
    float* out;  // where the products of this piece are written
};

// Says how a task is cut into pieces, which have numbers from 0.
class ProductPieces {
public:
    ProductPieces(const ProductTable& kernels, const ProductTask& of,
                  const std::byte* rounded_tokens);
    // Returns how many pieces a product of n_rows rows and n_tokens tokens has.
    static int count(const ProductTable& kernels, int n_rows, int n_tokens);
    int size() const { return n_tiles_ * n_parts_; }
    ProductPiece operator[](int number) const;

    ProductTask task;
    const std::byte* rounded;

private:
    std::size_t stride_;  // bytes of a rounded token
    int tile_rows_;
    int n_tiles_;
    int n_parts_;
};

}  // namespace entropykv
