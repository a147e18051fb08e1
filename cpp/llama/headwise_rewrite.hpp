// Replaces the K and V writes and the attention nodes of all layers by operations of the headwise
// store.
#pragma once

#include <vector>

#include "attention/attention_batch.hpp"
#include "llama/attention_probe.hpp"
#include "llama/graph_hook.hpp"

namespace entropykv {

class HeadwiseRewrite : public GraphRewrite {
public:
    // `attention` and `nodes` must outlive the last decode of the context.
    HeadwiseRewrite(AttentionBatch& attention, const std::vector<AttentionNode>& nodes,
                    std::atomic<const char*>& fault);

    bool change(ggml_tensor* node) override;
    int n_expected() const override;

private:
    struct LayerHook {
        HeadwiseRewrite* rewrite;
        int layer;  // number in the store
        int reader;
        int cache_layer;
        AttentionParams params;
        std::vector<float> slopes;  // ALiBi's; empty: none
        int next_reader = 0;        // next reader in the graph; used for the first reader only
    };
    using OpFunction = void (*)(ggml_tensor*, int, int, void*);

    void replace(ggml_tensor* node, OpFunction function, const LayerHook& layer);
    LayerHook* layer_of(int cache_layer);
    const LayerShape& shape_of(int layer) const {
        return nodes_[static_cast<std::size_t>(layer)].shape;
    }

    static void stage_k_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    static void stage_v_op(ggml_tensor* node, int thread, int n_threads, void* user_data);
    static void attend_op(ggml_tensor* node, int thread, int n_threads, void* user_data);

    AttentionBatch& attention_;
    const std::vector<AttentionNode>& nodes_;
    std::vector<LayerHook> layers_;
};

}  // namespace entropykv
