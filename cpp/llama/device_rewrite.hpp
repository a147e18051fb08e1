// Lets the device store compute attention. The nodes that write K and V stay, and the attention
// nodes are left out: their attention is computed on the layer's device, between the nodes before
// and after. Where llama.cpp's own graph can compute a step as a whole (see DeviceStore::begin()),
// its nodes are changed for that step instead.
#pragma once

#include <vector>

#include "llama/attention_probe.hpp"
#include "llama/graph_hook.hpp"
#include "llama/graph_nodes.hpp"
#include "llama/node_changes.hpp"
#include "llama/node_times.hpp"

namespace entropykv {

class DeviceBatch;

class DeviceRewrite : public GraphRewrite {
public:
    // `batch`, `nodes` and `times` must outlive the last decode of the context. While nodes are
    // timed, no graph computes a step as a whole.
    DeviceRewrite(DeviceBatch& batch, const std::vector<AttentionNode>& nodes,
                  const NodeTimes& times, std::atomic<const char*>& fault)
        : GraphRewrite(fault), batch_(batch), nodes_(nodes), times_(times) {}

    void begin_step() override;
    bool change(ggml_tensor* node) override;
    bool attend_instead(ggml_tensor* node) override;
    void end_step() override;
    void check_step() override;
    int n_expected() const override;

private:
    int layer_of(int cache_layer) const;
    bool is_served(int layer);
    bool leave_out(ggml_tensor* node);
    void begin();
    void make_anew();
    bool repeat(const ggml_tensor* node);
    int change_anew(ggml_tensor* node);

    // A node that was looked at in the last step that changed the graph.
    struct Seen {
        const ggml_tensor* node;
        const void* source;     // where its first source lay
        int attends;            // number of the layer whose attention it computes; -1: none
        std::size_t n_changes;  // how many changes were made until then
    };

    DeviceBatch& batch_;
    const std::vector<AttentionNode>& nodes_;
    const NodeTimes& times_;
    const ggml_tensor* left_out_ = nullptr;  // the attention node that the device store computes
    bool begun_ = false;                     // whether the batch has begun this step
    NodeOrder order_;
    NodeChanges changes_;  // changes of the graph of this step
    // Say what can be repeated while llama.cpp uses its graph again: the nodes that were looked at,
    // whether these are all nodes of the graph, whether this step repeats the changes, and for how
    // many nodes it has.
    std::vector<Seen> seen_;
    bool is_whole_ = false;
    bool repeats_ = false;
    std::size_t n_repeated_ = 0;
};

}  // namespace entropykv
