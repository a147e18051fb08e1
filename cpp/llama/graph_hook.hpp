// Connects a store to llama.cpp through the evaluation callback of one llama_context. First the
// context decodes one token while the graph is only probed (attention_probe.hpp). After serve() or
// serve_on_devices(), attention and products of weights are changed in every graph before it is
// computed. Gates are changed while probing, too (weight_hook.hpp).
#pragma once

#include <ggml.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention.hpp"
#include "llama/attention_probe.hpp"
#include "llama/weight_hook.hpp"

namespace entropykv {

class DeviceBatch;

// Changes the graphs so that the sequences of a micro-batch attend with their own stores: on the
// CPU (graph_hook.cpp) or on devices (device_rewrite.hpp).
class GraphRewrite {
public:
    // fault: set to what is wrong with a graph, also by ggml's threads.
    explicit GraphRewrite(std::atomic<const char*>& fault) : fault_(fault) {}
    virtual ~GraphRewrite() = default;
    GraphRewrite(const GraphRewrite&) = delete;
    GraphRewrite& operator=(const GraphRewrite&) = delete;

    virtual void begin_step() { served_ = 0; }
    // Sees every node before it is computed, and may change it. Returns whether llama.cpp shall
    // compute the graph up to this node before it goes on. Throws std::bad_alloc.
    virtual bool change(ggml_tensor* node) = 0;
    // Called after the graph was computed up to a node. Returns whether devices have computed the
    // attention of the node instead of llama.cpp.
    virtual bool attend_instead(ggml_tensor*) { return false; }
    // Undoes changes that are for one step only. Must be called while the graph of the step exists.
    virtual void end_step() {}
    // Throws GraphError if the graph of the step was unexpected, or what computing it has thrown.
    virtual void check_step() {}
    // Return how many nodes a step must have changed, and how many it has.
    virtual int n_expected() const = 0;
    int n_served() const { return served_; }

protected:
    static constexpr const char* kUnknownNode =
        "a graph has an attention node that the first one did not have";

    std::atomic<const char*>& fault_;
    int served_ = 0;
};

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
    // Throws GraphError unless, since begin_step(), every layer was served for all tokens, and its
    // gate was changed; throws what computing the graph has thrown.
    void check_step();

private:
    bool see(ggml_tensor* node);

    WeightHook weights_;
    AttentionProbe probe_;
    std::unique_ptr<GraphRewrite> rewrite_;    // null: graphs are probed
    std::atomic<const char*> fault_{nullptr};  // set while the graph runs, reported by check_step()
};

}  // namespace entropykv
