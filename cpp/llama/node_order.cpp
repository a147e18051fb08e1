#include "llama/node_order.hpp"

#include <algorithm>
#include <iterator>

#include "llama/cache_tensors.hpp"

namespace entropykv {

void NodeOrder::note(ggml_tensor* node) {
    const bool writes = node->op == GGML_OP_SET_ROWS &&
                        (cache_layer_of(node, kCacheK) >= 0 || cache_layer_of(node, kCacheV) >= 0);
    if (writes) nodes_.clear();
    nodes_.push_back(node);
}

std::vector<ggml_tensor*> NodeOrder::slots_of(const ggml_tensor* attention) const {
    const auto is_view = [](const ggml_tensor* tensor) {
        return tensor->op == GGML_OP_VIEW || tensor->op == GGML_OP_PERMUTE ||
               tensor->op == GGML_OP_RESHAPE;
    };
    const ggml_tensor* queries = attention->src[0];
    while (is_view(queries)) queries = queries->src[0];
    const auto computed = std::find(nodes_.begin(), nodes_.end(), queries);
    const auto first = computed == nodes_.end() ? nodes_.begin() : computed + 1;
    std::vector<const ggml_tensor*> views;
    if (is_view(attention->src[0])) views.push_back(attention->src[0]);
    for (const ggml_tensor* rows : {attention->src[1], attention->src[2]})
        for (; is_view(rows); rows = rows->src[0]) views.push_back(rows);
    std::vector<ggml_tensor*> slots;
    std::copy_if(first, nodes_.end(), std::back_inserter(slots), [&](const ggml_tensor* tensor) {
        return std::find(views.begin(), views.end(), tensor) != views.end();
    });
    return slots;
}

}  // namespace entropykv
