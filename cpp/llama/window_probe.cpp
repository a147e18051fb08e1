#include "llama/window_probe.hpp"

#include <ggml-backend.h>
#include <ggml.h>

#include <cmath>
#include <cstdint>

#include "llama/cache_tensors.hpp"

namespace entropykv {
namespace {

// Counts the cells that the first token of a mask [n_cells, n_tokens] attends to. The mask is an
// input of the graph, so it is known before anything is computed.
int seen_cells(const ggml_tensor* mask) {
    const bool readable = mask != nullptr && mask->type == GGML_TYPE_F16 && mask->data != nullptr &&
                          (mask->buffer == nullptr || ggml_backend_buffer_is_host(mask->buffer));
    if (!readable) return -1;
    const auto* row = static_cast<const ggml_fp16_t*>(mask->data);
    int n = 0;
    for (std::int64_t cell = 0; cell < mask->ne[0]; ++cell)
        n += std::isfinite(ggml_fp16_to_fp32(row[cell])) ? 1 : 0;
    return n;
}

}  // namespace

bool WindowProbe::on_node(ggml_tensor* node, bool ask, void* user_data) {
    if (ask && node->op == GGML_OP_FLASH_ATTN_EXT)
        static_cast<WindowProbe*>(user_data)->visible_.emplace_back(
            cache_layer_of(node->src[1], kCacheK), seen_cells(node->src[3]));
    return !ask;
}

}  // namespace entropykv
