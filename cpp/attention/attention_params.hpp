// What a node of the graph says about the attention of a layer.
#pragma once

#include <cstddef>
#include <vector>

namespace entropykv {

// Constants of one layer's attention.
struct AttentionParams {
    float scale = 1.0f;
    float softcap = 0.0f;          // 0: none
    const float* sinks = nullptr;  // one logit per query head, or null
    // What a logit falls by per position of distance (ALiBi), one per query head, or null.
    const float* slopes = nullptr;
};

// ALiBi's, as ggml computes them from op_params of a flash attention node.
std::vector<float> alibi_slopes(int n_head, float max_bias);

// f32 rows of one micro-batch, [n_tokens][n_head][dim] at byte strides.
struct RowsView {
    const std::byte* data;
    std::size_t token_stride;
    std::size_t head_stride;
    const float* row(int token, int head) const {
        return reinterpret_cast<const float*>(data +
                                              static_cast<std::size_t>(token) * token_stride +
                                              static_cast<std::size_t>(head) * head_stride);
    }
    // The rows from a token on.
    RowsView from(int token) const {
        return {data + static_cast<std::size_t>(token) * token_stride, token_stride, head_stride};
    }
};

}  // namespace entropykv
