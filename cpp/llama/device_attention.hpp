// Computes the attention of the layers of one device, each as a graph of ggml's own operations
// between two nodes of llama.cpp's graph: it copies K and V of the micro-batch to the rows of their
// KV heads, attends to these rows, and sums up what the queries gave to each of them. The host
// writes once before a step what the graphs of all layers need, and reads once after it what they
// have found out.
#pragma once

#include <ggml.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "decide/importance.hpp"
#include "decide/rope_params.hpp"
#include "llama/device.hpp"
#include "llama/device_layer.hpp"

namespace entropykv {

// Is what a layer's attention node of llama.cpp reads and writes. The tensors may be views.
struct DeviceNode {
    const ggml_tensor* q;        // [k_dim, n_tokens, n_head], f32
    const ggml_tensor* k_cells;  // [k_dim, cells, n_head_kv]: token i of the micro-batch in cell i
    const ggml_tensor* v_cells;
    const ggml_tensor* output;  // [v_dim, n_head, n_tokens], f32
    const ggml_tensor* sinks;   // [n_head], f32, or null
};

struct DeviceStep {
    int n_tokens = 0;
    std::int32_t position = 0;  // of the first token
    bool observing = false;     // whether its queries count towards importance
    int first = 0;              // where its tokens begin in the micro-batch
    int n_drafts = 0;           // how many of its tokens, the last ones, are drafts
};

// Are the op_params of GGML_OP_FLASH_ATTN_EXT.
using DeviceParams = std::array<std::int32_t, GGML_MAX_OP_PARAMS / sizeof(std::int32_t)>;

class StepInput;

// The layers of one sequence on one device.
class DeviceAttention {
public:
    // The device must outlive this object.
    DeviceAttention(Device& device, const ImportanceSettings& importance)
        : device_(device), importance_(importance) {}
    DeviceAttention(const DeviceAttention&) = delete;
    DeviceAttention& operator=(const DeviceAttention&) = delete;

    // Adds a layer, which must outlive this object, and returns its number here.
    int add(DeviceLayer& layer, const DeviceParams& params, bool has_sinks);
    // Must be called once, after all layers were added. Throws std::bad_alloc.
    void allocate(int max_tokens);
    // Returns the name of an operation that the device cannot compute for a layer, or an empty
    // string.
    std::string unsupported(int layer, int n_tokens);
    // Returns the name of an operation that the device needs to move a layer's keys to other
    // positions and cannot compute, or an empty string.
    std::string unsupported_rotation(int layer, const RopeParams& rope);

    // Writes to the device what the layers' graphs need for a step, for which all heads have chosen
    // their rows.
    void begin_step(const DeviceStep& step);
    // Computes the attention of one of the layers that read its K and V; the first one writes them.
    // Throws std::runtime_error if the device fails, std::bad_alloc if it has no memory.
    void run(int layer, int reader, const DeviceNode& node);
    // Reads from the device what its layers have found out in a step.
    void end_step();
    // Return what queries gave to the rows of a head in the last step, and the squared norms of V
    // of its tokens; null if that was not asked for.
    const float* observed(int layer, int head) const;
    const float* value_squares(int layer, int head) const;

    // Turns all keys of a layer by as many positions as `by_row` says, for every row of each head.
    void rotate(int layer, const RopeParams& rope,
                const std::vector<std::vector<std::int32_t>>& by_row);
    // Must be called if rows of a layer got other entries than those of a step.
    void forget_positions(int layer);

    const Device& device() const { return device_; }
    // Counts what host and device tell each other, without the working memory of the device.
    std::size_t scratch_bytes() const;

private:
    // Offsets in the memories of a layer, in bytes; those of input and findings are of this step.
    struct Places {
        std::size_t rows;           // [KV head][token], i64: where K and V of the tokens go
        std::size_t changed;        // [n_changed], i64: which positions change
        std::size_t new_positions;  // [n_changed], f32
        std::size_t oldest;         // [token], f32: the oldest position that a query sees
        std::size_t slopes;         // [query head], f32: those of ALiBi
        std::size_t positions;      // [position of all heads], f32
        std::size_t observed;       // as positions
        std::size_t value_squares;  // [KV head][token], f32
        int n_changed;
    };
    struct Served {
        DeviceLayer* layer;
        DeviceParams params;
        std::vector<float> slopes;  // by query head; empty: no ALiBi
        bool has_sinks;
        bool positions_known = false;  // to the device
        Places places{};
    };
    friend class DeviceGraph;

    void add_inputs(Served& served, StepInput& input);
    void place_findings(const DeviceStep& step);

    Device& device_;
    const ImportanceSettings& importance_;
    std::vector<Served> layers_;
    std::unique_ptr<DeviceMemory> input_;
    std::unique_ptr<DeviceMemory> positions_;
    std::unique_ptr<DeviceMemory> findings_;
    std::size_t token_positions_ = 0;  // offset in the input: [token], f32
    int max_tokens_ = 0;               // of a micro-batch
    DeviceStep step_;
    std::vector<std::uint8_t> written_;  // the input of a step
    std::vector<std::uint8_t> found_;    // the findings of a step
};

}  // namespace entropykv
