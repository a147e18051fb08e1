#include "llama/window_probe.hpp"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "llama/graph_nodes.hpp"

namespace entropykv {
namespace {

// Counts the cells that the first token of a mask [n_cells, n_tokens] attends to. The mask is an
// input of the graph, so it is known before anything is computed, also in its copy on a device.
int seen_cells(const ggml_tensor* mask) {
    if (mask == nullptr || mask->type != GGML_TYPE_F16 || mask->data == nullptr) return -1;
    std::vector<ggml_fp16_t> row(static_cast<std::size_t>(mask->ne[0]));
    if (mask->buffer == nullptr)
        std::memcpy(row.data(), mask->data, row.size() * sizeof(ggml_fp16_t));
    else
        ggml_backend_tensor_get(mask, row.data(), 0, row.size() * sizeof(ggml_fp16_t));
    return static_cast<int>(std::count_if(row.begin(), row.end(), [](ggml_fp16_t value) {
        return std::isfinite(ggml_fp16_to_fp32(value));
    }));
}

}  // namespace

bool WindowProbe::on_node(ggml_tensor* node, bool ask, void* user_data) {
    if (ask && node->op == GGML_OP_FLASH_ATTN_EXT)
        static_cast<WindowProbe*>(user_data)->visible_.emplace_back(
            cache_layer_of(node->src[1], kCacheK), seen_cells(node->src[3]));
    return !ask;
}

}  // namespace entropykv
