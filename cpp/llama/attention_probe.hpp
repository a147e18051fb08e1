// Finds out how a model attends, from the graph of one token: the geometry of every layer with K
// and V, or why the headwise or device store cannot serve the model.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "llama/graph_nodes.hpp"
#include "llama/rope_probe.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

struct AttentionNode {
    int cache_layer;  // N of cache_k_l<N>
    LayerShape shape;
    float scale;
    float softcap;
    float max_bias;  // ALiBi's largest bias; 0: none
    bool has_sinks;
    RopeParams rope;       // rotates the stored keys
    float rope_magnitude;  // factor by which the rotation multiplies keys
    // The device store needs the buffer type of the layer's cache, and what the node computes.
    ggml_backend_buffer_type_t memory;
    bool is_apart;  // whether the node is computed on another device than that of the cache
    std::array<std::int32_t, GGML_MAX_OP_PARAMS / sizeof(std::int32_t)> op_params;
    // How many views before a node of the layer are read by that node alone, at least. They compute
    // nothing, and come after the writes of K and V and after the queries.
    int slots;
    // True if the queries of one token lie behind those of the token before.
    bool dense_queries;
};

class AttentionProbe {
public:
    // on_devices: the device store will serve, so attention may be on any device.
    explicit AttentionProbe(bool on_devices) : on_devices_(on_devices) {}

    // Must be called for every node of the graph, in the order of the graph.
    void look_at(ggml_tensor* node);
    // Forgets the graph's tensors, which may no longer exist; what was found stays.
    void end();

    // Returns what was found in the order of the graph: one node for every layer with K and V of
    // its own, whose readers are all layers that attend to them.
    const std::vector<AttentionNode>& nodes() const { return nodes_; }
    // Returns why this graph cannot be served, or an empty string.
    const std::string& refusal() const { return refusal_; }
    // Returns why stored keys cannot be moved to other positions, or an empty string.
    const std::string& rope_obstacle() const { return rope_obstacle_; }
    // Returns for how many positions the model's frequencies hold; 0: as many as it was trained
    // for.
    int rope_limit() const { return rope_limit_; }

private:
    struct Keys {  // where a layer writes its K, and the RoPE that K had
        int cache_layer;
        RopeSeen rope;
    };

    void probe_attention(const ggml_tensor* node);
    void probe_reader(AttentionNode& first, const ggml_tensor* node, const AttentionNode& seen);
    void probe_device(const ggml_tensor* node);
    void probe_write(const ggml_tensor* node);
    void probe_keys(const ggml_tensor* rows, int cache_layer);
    RopeSeen rope_of(int cache_layer, int head_dim);
    void refuse(const std::string& why);
    void note_obstacle(const std::string& why);

    bool on_devices_;
    std::vector<AttentionNode> nodes_;
    std::vector<const ggml_tensor*> masks_;  // the mask of each of nodes_
    std::vector<Keys> keys_;
    DeviceCopies copies_;
    NodeOrder order_;
    std::string refusal_;
    std::string rope_obstacle_;
    int rope_limit_ = 0;
};

}  // namespace entropykv
