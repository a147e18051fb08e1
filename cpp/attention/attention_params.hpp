// Holds what a node of the graph tells about the attention of a layer.
#pragma once

#include <cstddef>
#include <vector>

namespace entropykv {

// Holds the constants of one layer's attention.
struct AttentionParams {
    float scale = 1.0f;
    float softcap = 0.0f;          // 0: logits are not capped
    const float* sinks = nullptr;  // has one logit per query head, or is null
    // Says by how much a logit falls per position of distance (ALiBi), one value per query head, or
    // is null.
    const float* slopes = nullptr;
};

// Returns ALiBi's slopes, as ggml computes them from the op_params of a flash attention node.
std::vector<float> alibi_slopes(int n_head, float max_bias);

// Refers to f32 rows of one micro-batch, [n_tokens][n_head][dim], by strides in bytes.
struct RowsView {
    const std::byte* data;
    std::size_t token_stride;
    std::size_t head_stride;
    const float* row(int token, int head) const {
        return reinterpret_cast<const float*>(data +
                                              static_cast<std::size_t>(token) * token_stride +
                                              static_cast<std::size_t>(head) * head_stride);
    }
    // Returns the view without the rows of the first `token` tokens.
    RowsView from(int token) const {
        return {data + static_cast<std::size_t>(token) * token_stride, token_stride, head_stride};
    }
};

}  // namespace entropykv
