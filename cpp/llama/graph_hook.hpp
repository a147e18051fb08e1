// Connects a store to llama.cpp through the evaluation callback of one llama_context. First the
// context decodes one token while the graph is only probed (attention_probe.hpp). After serve() or
// serve_on_devices(), every graph is changed before it is computed (graph_rewrite.hpp). Products of
// quantised weights and gates are changed in any case (weight_hook.hpp).
#pragma once

#include <ggml.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention_batch.hpp"
#include "llama/attention_probe.hpp"
#include "llama/graph_rewrite.hpp"
#include "llama/weight_hook.hpp"

namespace entropykv {

class DeviceBatch;

class GraphHook {
public:
    // The parameters are those of its WeightHook, whose gates are changed while probing, too.
    // on_devices: the device store will serve, so attention may be on any device.
    GraphHook(int relu2_layers, int n_threads, int few_tokens = 1, bool on_devices = false,
              const std::string& kernels = "")
        : weights_(relu2_layers, n_threads, few_tokens, kernels), probe_(on_devices) {}
    GraphHook(const GraphHook&) = delete;
    GraphHook& operator=(const GraphHook&) = delete;

    // Serves as llama_context_params.cb_eval, with this object as cb_eval_user_data. The object
    // must outlive the context.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data);

    const std::vector<AttentionNode>& nodes() const { return probe_.nodes(); }
    // Returns why this graph cannot be served, or an empty string. Final after one decoded token.
    std::string refusal() const {
        const char* fault = fault_.load();
        return probe_.refusal().empty() && fault != nullptr ? fault : probe_.refusal();
    }
    const std::string& rope_obstacle() const { return probe_.rope_obstacle(); }
    int rope_limit() const { return probe_.rope_limit(); }

    // Changes all graphs from now on. `attention` must outlive the last decode of the context.
    void serve(AttentionBatch& attention);
    // Lets device stores attend in all graphs from now on. `batch` must outlive the last decode of
    // the context.
    void serve_on_devices(DeviceBatch& batch);

    ProductHook& products() { return weights_.products(); }
    const ProductHook& products() const { return weights_.products(); }
    NodeTimes& times() { return weights_.times(); }

    void begin_step();
    // Throws std::runtime_error unless, since begin_step(), every layer was served for all tokens,
    // and its gate was changed.
    void check_step();

private:
    bool see(ggml_tensor* node);

    WeightHook weights_;
    AttentionProbe probe_;
    std::unique_ptr<GraphRewrite> rewrite_;    // null: graphs are probed
    std::atomic<const char*> fault_{nullptr};  // set while the graph runs, reported by check_step()
};

}  // namespace entropykv
