// The seam to llama.cpp: replaces the K and V writes and the attention node of every layer in the
// graphs of one llama_context, through its evaluation callback. First the context decodes one token
// with the hook only looking (probe): what it saw is the model's geometry, or why the headwise
// store cannot serve it. Then serve() hands it the attention of the sequences whose tokens are in a
// micro-batch, and from then on every graph is changed before it is computed.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/attention_batch.hpp"
#include "llama/rope_probe.hpp"
#include "llama/weight_hook.hpp"

struct ggml_tensor;

namespace entropykv {

struct AttentionNode {
    int cache_layer;  // N of cache_k_l<N>
    LayerShape shape;
    float scale;
    float softcap;
    float max_bias;  // of ALiBi; 0: none
    bool has_sinks;
    RopeParams rope;  // of its stored keys
};

class GraphHook {
public:
    // Of its WeightHook, whose gates are changed while probing, too.
    GraphHook(int relu2_layers, int n_threads, bool in_company = false);
    GraphHook(const GraphHook&) = delete;
    GraphHook& operator=(const GraphHook&) = delete;

    // For llama_context_params.cb_eval and cb_eval_user_data; valid as long as this object.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data);

    // What the probe saw, in the order of the graph: one for every layer that has K and V of its
    // own, with all that attend to them as its readers.
    const std::vector<AttentionNode>& nodes() const { return nodes_; }
    // Why this graph cannot be served; empty if it can. Final once one token was decoded.
    std::string refusal() const {
        const char* fault = fault_.load();
        return refusal_.empty() && fault != nullptr ? fault : refusal_;
    }
    // Why stored keys cannot be moved to other positions; empty if they can.
    const std::string& rope_obstacle() const { return rope_obstacle_; }
    // Positions that the model's frequencies hold for; 0: as many as it was trained for.
    int rope_limit() const { return rope_limit_; }

    // From now on graphs are changed. `attention` must outlive the context's last decode.
    void serve(AttentionBatch& attention);

    const ProductHook& products() const { return weights_.products(); }
    NodeTimes& times() { return weights_.times(); }

    void begin_step();
    // Throws std::runtime_error unless every layer was served, for all tokens, since begin_step(),
    // its gate included.
    void check_step() const;

private:
    struct LayerHook {
        GraphHook* hook;
        int layer;  // of the store
        int reader;
        int cache_layer;
        AttentionParams params;
        std::vector<float> slopes;  // of ALiBi, or none
        int next_reader = 0;        // of the graph, where reader is 0
    };
    struct Keys {  // what a layer writes as K
        int cache_layer;
        RopeSeen rope;
    };
    using OpFunction = void (*)(ggml_tensor*, int, int, void*);

    bool look(const ggml_tensor* node);
    void look_at_attention(const ggml_tensor* node);
    void look_at_reader(AttentionNode& first, const ggml_tensor* node, const AttentionNode& seen);
    void look_at_write(const ggml_tensor* node);
    void look_at_keys(const ggml_tensor* rows, int cache_layer);
    RopeParams rope_of(int cache_layer, int head_dim);
    void refuse(const std::string& why);
    void note_obstacle(const std::string& why);
    void change(ggml_tensor* node);
    void replace(ggml_tensor* node, OpFunction function, const LayerHook& layer);
    LayerHook* layer_of(int cache_layer);

    static void stage_k_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    static void stage_v_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    static void attend_op(ggml_tensor* node, int thread, int n_threads, void* user_data);

    AttentionBatch* attention_ = nullptr;
    WeightHook weights_;
    std::vector<AttentionNode> nodes_;
    std::vector<const ggml_tensor*> masks_;  // of nodes_, while probing
    std::vector<LayerHook> layers_;
    std::vector<Keys> keys_;
    DeviceCopies copies_;  // while probing
    std::string refusal_;
    std::string rope_obstacle_;
    int rope_limit_ = 0;
    int served_ = 0;                           // nodes of ours in the graphs of this step
    std::atomic<const char*> fault_{nullptr};  // set in the graph, reported by check_step()
};

}  // namespace entropykv
