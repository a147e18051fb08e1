// Calls the kernel with which bitnet.cpp computes ternary products, if its sources were given. Its
// tokens are integers here, so that the time to round activations is not counted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#if defined(ENTROPYKV_BITNET_CPP)
#include "gemm-config.h"

// Defined in src/ggml-bitnet-mad.cpp: multiplies one row with nrc tokens, which are `by` bytes
// apart, and writes floats that are `bs` apart.
void ggml_vec_dot_i2_i8_s(int n, float* s, std::size_t bs, const void* vx, std::size_t bx,
                          const void* vy, std::size_t by, int nrc);

namespace entropykv {

// Holds random ternary weights in bitnet.cpp's I2_S: byte m of every 32 holds values m, m + 32, m +
// 64 and m + 96 of 128, the first in the upper bits.
class BitnetCpp {
public:
    BitnetCpp(int n_values, int n_rows, int n_tokens)
        : n_values_(n_values),
          n_rows_(n_rows),
          n_tokens_(n_tokens),
          weights_(size(n_values / 4) * size(n_rows)),
          tokens_(size(n_values) * size(n_tokens)),
          out_(size(n_rows) * size(n_tokens)) {
        std::mt19937 random(1);
        for (std::uint8_t& codes : weights_)
            for (int i = 0; i < 4; ++i)
                codes = static_cast<std::uint8_t>(codes << 2 | random() % 3);
        for (std::int8_t& x : tokens_)
            x = static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127);
    }

    // Computes all products in the tiles of bitnet.cpp.
    void run() {
        for (int row = 0; row < n_rows_; row += COL_BLOCK_SIZE)
            for (int t = 0; t < n_tokens_; t += ROW_BLOCK_SIZE)
                for (int r = row; r < std::min(row + COL_BLOCK_SIZE, n_rows_); ++r)
                    ggml_vec_dot_i2_i8_s(n_values_, &out_[size(t) * size(n_rows_) + size(r)],
                                         size(n_rows_), &weights_[size(r) * size(n_values_ / 4)], 0,
                                         &tokens_[size(t) * size(n_values_)], size(n_values_),
                                         std::min(ROW_BLOCK_SIZE, n_tokens_ - t));
    }

    // Tells whether run() has computed the product of a row and a token correctly.
    bool is_right(int row, int token) const {
        int sum = 0;
        for (int i = 0; i < n_values_; ++i) {
            const int codes =
                weights_[size(row) * size(n_values_ / 4) + size(i / 128 * 32 + i % 32)];
            sum += (codes >> (6 - 2 * (i % 128 / 32)) & 3) *
                   tokens_[size(token) * size(n_values_) + size(i)];
        }
        return out_[size(token) * size(n_rows_) + size(row)] == static_cast<float>(sum);
    }

private:
    static std::size_t size(int i) { return static_cast<std::size_t>(i); }

    int n_values_, n_rows_, n_tokens_;
    std::vector<std::uint8_t> weights_;
    std::vector<std::int8_t> tokens_;
    std::vector<float> out_;
};

}  // namespace entropykv
#endif
