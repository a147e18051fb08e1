#include "llama/custom_op.hpp"

#include <ggml-backend.h>

#include <cstddef>

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

}  // namespace entropykv
