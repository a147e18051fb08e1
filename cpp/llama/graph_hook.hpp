// Connects the headwise store to llama.cpp: replaces the K and V writes and the attention nodes of
// all layers in the graphs of one llama_context, through its evaluation callback. First the context
// decodes one token while the hook only probes the graph: it finds the geometry of the model, or
// why the headwise store cannot serve it. After serve(), every graph is changed before it is
// computed, so that the sequences of the micro-batch attend with their own stores. For the device
// store, the write nodes stay, and the attention nodes are left out: their attention is computed on
// the layer's device, between the nodes before and after. If a single token is read, the device
// store changes the nodes instead, so that the device computes the graph as a whole.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/attention_batch.hpp"
#include "llama/node_changes.hpp"
#include "llama/rope_probe.hpp"
#include "llama/weight_hook.hpp"

namespace entropykv {

class DeviceBatch;

struct AttentionNode {
    int cache_layer;  // N of cache_k_l<N>
    LayerShape shape;
    float scale;
    float softcap;
    float max_bias;  // ALiBi's largest bias; 0: none
    bool has_sinks;
    RopeParams rope;       // rotates the stored keys
    float rope_magnitude;  // by which the rotation multiplies keys
    // Are for the device store: the buffer type of the layer's cache, and what the node computes.
    ggml_backend_buffer_type_t memory;
    bool is_apart;  // whether another device computes it than that of the cache
    std::array<std::int32_t, GGML_MAX_OP_PARAMS / sizeof(std::int32_t)> op_params;
    // How many nodes before it, at least, compute nothing, and are computed after the writes of K
    // and V and after the queries: views that only the attention node reads.
    int slots;
};

class GraphHook {
public:
    // The parameters are those of its WeightHook, whose gates are changed while probing, too.
    // on_devices: the device store will serve, so attention may be on any device.
    GraphHook(int relu2_layers, int n_threads, int few_tokens = 1, bool on_devices = false,
              const std::string& kernels = "");
    GraphHook(const GraphHook&) = delete;
    GraphHook& operator=(const GraphHook&) = delete;

    // Is the callback for llama_context_params.cb_eval, with this object as cb_eval_user_data. The
    // object must outlive the context.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data);

    // Returns what the probe found in the order of the graph: one node for every layer with K and V
    // of its own, whose readers are all layers that attend to them.
    const std::vector<AttentionNode>& nodes() const { return nodes_; }
    // Returns why this graph cannot be served, or an empty string. Final after one decoded token.
    std::string refusal() const {
        const char* fault = fault_.load();
        return refusal_.empty() && fault != nullptr ? fault : refusal_;
    }
    // Returns why stored keys cannot be moved to other positions, or an empty string.
    const std::string& rope_obstacle() const { return rope_obstacle_; }
    // Returns for how many positions the model's frequencies hold; 0: as many as it was trained
    // for.
    int rope_limit() const { return rope_limit_; }

    // Changes all graphs from now on. `attention` must outlive the last decode of the context.
    void serve(AttentionBatch& attention);
    // Does the same with device stores; `batch` must outlive the last decode, too.
    void serve_on_devices(DeviceBatch& batch);

    ProductHook& products() { return weights_.products(); }
    const ProductHook& products() const { return weights_.products(); }
    NodeTimes& times() { return weights_.times(); }

    void begin_step();
    // Throws std::runtime_error unless, since begin_step(), every layer was served for all tokens,
    // and its gate was changed.
    void check_step();

private:
    struct LayerHook {
        GraphHook* hook;
        int layer;  // number in the store
        int reader;
        int cache_layer;
        AttentionParams params;
        std::vector<float> slopes;  // are those of ALiBi; empty: none
        int next_reader = 0;        // next reader in the graph; used for the first reader only
    };
    struct Keys {  // is what a layer writes as K
        int cache_layer;
        RopeSeen rope;
    };
    using OpFunction = void (*)(ggml_tensor*, int, int, void*);

    bool probe(ggml_tensor* node);
    void probe_attention(const ggml_tensor* node);
    void probe_reader(AttentionNode& first, const ggml_tensor* node, const AttentionNode& seen);
    void probe_device(const ggml_tensor* node);
    void probe_write(const ggml_tensor* node);
    void probe_keys(const ggml_tensor* rows, int cache_layer);
    RopeSeen rope_of(int cache_layer, int head_dim);
    void refuse(const std::string& why);
    void note_obstacle(const std::string& why);
    void change(ggml_tensor* node);
    void note_order(ggml_tensor* node);
    std::vector<ggml_tensor*> slots_of(const ggml_tensor* attention) const;
    bool change_on_devices(ggml_tensor* node);
    int layer_on_devices(int cache_layer) const;
    bool is_served(int layer);
    bool leave_out(ggml_tensor* node);
    bool attend_instead(ggml_tensor* node);
    void replace(ggml_tensor* node, OpFunction function, const LayerHook& layer);
    LayerHook* layer_of(int cache_layer);

    static void stage_k_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    static void stage_v_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    static void attend_op(ggml_tensor* node, int thread, int n_threads, void* user_data);

    AttentionBatch* attention_ = nullptr;
    DeviceBatch* devices_ = nullptr;
    bool on_devices_;
    const ggml_tensor* left_out_ = nullptr;  // the attention node that the device store computes
    bool begun_ = false;                     // whether the device store has begun this step
    std::vector<ggml_tensor*> in_order_;     // nodes from the last write of K or V on
    NodeChanges changes_;                    // of the graph of this step
    WeightHook weights_;
    std::vector<AttentionNode> nodes_;
    std::vector<const ggml_tensor*> masks_;  // masks of nodes_, while probing
    std::vector<LayerHook> layers_;
    std::vector<Keys> keys_;
    DeviceCopies copies_;  // used while probing
    std::string refusal_;
    std::string rope_obstacle_;
    int rope_limit_ = 0;
    int served_ = 0;                           // our nodes in the graphs of this step
    std::atomic<const char*> fault_{nullptr};  // set while the graph runs, reported by check_step()
};

}  // namespace entropykv
