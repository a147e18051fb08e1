// Computes the attention of one layer on its device, as a graph of ggml's own operations between
// two nodes of llama.cpp's graph: it copies K and V of the micro-batch to the rows of their KV
// heads, attends to these rows, and sums up what the queries gave to each of them.
#pragma once

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "decide/importance.hpp"
#include "llama/device_layer.hpp"

namespace entropykv {

struct FreeBackend {
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
};
struct FreeAllocator {
    void operator()(ggml_gallocr_t allocator) const { ggml_gallocr_free(allocator); }
};

// Is what a layer's attention node of llama.cpp reads and writes. The tensors may be views.
struct DeviceNode {
    const ggml_tensor* q;        // [k_dim, n_tokens, n_head], f32
    const ggml_tensor* k_cells;  // [k_dim, cells, n_head_kv]: token i of the micro-batch in cell i
    const ggml_tensor* v_cells;
    const ggml_tensor* output;      // [v_dim, n_head, n_tokens], f32
    const std::int32_t* op_params;  // those of GGML_OP_FLASH_ATTN_EXT
};

struct DeviceStep {
    int n_tokens = 0;
    std::int32_t position = 0;  // of the first token
    bool observing = false;     // whether its queries count towards importance
};

// Is what one layer has found out, for the host to decide who stays.
struct DeviceFindings {
    // By KV head: what queries gave to each of its rows. Empty if nothing is observed.
    std::vector<std::vector<float>> observed;
    std::vector<float> value_squares;  // [KV head][token]: squared norms of V
};

// One device: its backend, which ours shares with no other thread, and its working memory.
class DeviceAttention {
public:
    // memory: a buffer type of the device. Throws std::runtime_error if the device cannot be used.
    DeviceAttention(ggml_backend_buffer_type_t memory, int n_threads);

    // Returns the name of an operation that the device cannot compute for this layer, or an empty
    // string. n_tokens: of a micro-batch.
    std::string unsupported(const DeviceLayer& layer, const ImportanceSettings& importance,
                            const std::int32_t* op_params, int n_tokens);
    // Throws std::runtime_error if the device fails, std::bad_alloc if it has no memory.
    DeviceFindings run(const DeviceLayer& layer, const ImportanceSettings& importance,
                       const DeviceNode& node, const DeviceStep& step);

    ggml_backend_buffer_type_t memory() const { return memory_; }
    std::string name() const;
    std::size_t scratch_bytes() const {
        return ggml_gallocr_get_buffer_size(allocator_.get(), 0) + graph_memory_.size();
    }

private:
    ggml_backend_buffer_type_t memory_;
    std::unique_ptr<ggml_backend, FreeBackend> backend_;
    std::unique_ptr<ggml_gallocr, FreeAllocator> allocator_;
    std::vector<std::uint8_t> graph_memory_;
};

}  // namespace entropykv
