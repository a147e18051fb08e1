// Lets a device compute the attention of a node whose tensors lie where it cannot use them: copies
// what the node reads to memory of the device, and the result back. This is needed if another
// device computes the nodes around it, for example because this one is the CPU and serves a layer
// whose attention the layer's own device cannot compute.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "llama/device.hpp"

namespace entropykv {

// Names what a layer's attention node of llama.cpp reads and writes. The tensors may be views.
struct DeviceNode {
    const ggml_tensor* q = nullptr;  // [k_dim, n_tokens, n_head], f32
    // Have the shape [k_dim, cells, n_head_kv]: token i of the micro-batch is in cell i.
    const ggml_tensor* k_cells = nullptr;
    const ggml_tensor* v_cells = nullptr;
    const ggml_tensor* output = nullptr;  // [v_dim, n_head, n_tokens], f32
    const ggml_tensor* sinks = nullptr;   // [n_head], f32, or null; only the host reads them
};

class DeviceRelay {
public:
    // The device must outlive this object.
    explicit DeviceRelay(Device& device) : device_(device) {}

    // Returns the node with tensors that the device can use: those that it cannot use are copied,
    // but for the output, which only gets a place. The copies exist until the next call. Throws
    // std::bad_alloc.
    DeviceNode bring(const DeviceNode& node);
    // Must be called once the device has computed what bring() has returned: copies the output to
    // the node's own memory.
    void give_back();

    // Returns the bytes of the copies, which keep their memory for the next node.
    std::size_t bytes() const;

private:
    const ggml_tensor* usable(const ggml_tensor* tensor, std::int64_t n_tokens, bool is_read);
    void allocate();

    Device& device_;
    std::unique_ptr<ggml_context, FreeContext> context_;
    std::unique_ptr<ggml_backend_buffer, FreeBuffer> buffer_;
    std::vector<std::pair<ggml_tensor, ggml_tensor*>> to_bring_;
    const ggml_tensor* output_ = nullptr;  // null: the device writes to it
    const ggml_tensor* copied_output_ = nullptr;
};

}  // namespace entropykv
