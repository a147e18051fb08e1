#include "llama/graph_nodes.hpp"

#include <ggml-backend.h>

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace entropykv {
namespace {

// Tells whether a device may have been given a node. The scheduler gives a device only nodes that
// it supports. The node then lies in the device's own memory, unless it is a view of an older
// tensor, for example of the cache, in memory which the device can use.
bool may_be_of(ggml_backend_dev_t device, const ggml_tensor* node) {
    if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) return false;
    if (!ggml_backend_dev_supports_op(device, node)) return false;
    ggml_backend_buffer_type_t memory = ggml_backend_buffer_get_type(node->buffer);
    return memory == ggml_backend_dev_buffer_type(device) ||
           (node->view_src != nullptr && ggml_backend_dev_supports_buft(device, memory));
}

}  // namespace

bool is_of_cpu(const ggml_tensor* node) {
    if (node->buffer == nullptr || !ggml_backend_buffer_is_host(node->buffer)) return false;
    for (std::size_t i = 0; i < ggml_backend_dev_count(); ++i)
        if (may_be_of(ggml_backend_dev_get(i), node)) return false;
    return true;
}

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
