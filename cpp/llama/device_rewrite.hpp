// Lets the device store compute attention. The nodes that write K and V stay, and the attention
// nodes are left out: their attention is computed on the layer's device, between the nodes before
// and after. Where llama.cpp's own graph can compute a step as a whole (see DeviceStore::begin()),
// its nodes are changed for that step instead.
#pragma once

#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "llama/attention_probe.hpp"
#include "llama/device_store.hpp"
#include "llama/graph_hook.hpp"
#include "llama/graph_nodes.hpp"
#include "llama/node_changes.hpp"
#include "llama/node_times.hpp"

namespace entropykv {

// Computes the attention of a micro-batch that holds tokens of several sequences, each of which
// attends to its own range of tokens with its own store.
class DeviceBatch {
public:
    // Begins another micro-batch, which has no tokens yet.
    void clear();
    // Adds the next tokens, which belong to a sequence without tokens in this micro-batch; the
    // store must live until clear(). The other parameters are those of DeviceStore::reserve(). If
    // this throws, nothing was added.
    void add(DeviceStore& store, int n_tokens, std::int32_t position, std::int32_t rope_position,
             int n_drafts = 0, bool see_all = false);

    // Must be called before the first node is computed. in_graph: whether llama.cpp's own graph may
    // compute attention: for one sequence, or for single tokens of several. Errors are kept for
    // check_step(), here and in the following functions. Returns whether nodes are replaced as in
    // the micro-batch before; otherwise, begin_nodes() must be called before any is changed.
    bool begin(bool in_graph) noexcept;
    void begin_nodes() noexcept;
    // Tells whether llama.cpp's own graph computes attention in this micro-batch. Then its nodes
    // are changed.
    bool in_graph() const { return in_graph_; }
    void change_write(int layer, bool keys, ggml_tensor* node, NodeChanges& changes) noexcept;
    void change_attention(int layer, const DeviceNode& node, ggml_tensor* target,
                          const std::vector<ggml_tensor*>& slots, NodeChanges& changes) noexcept;
    // Must be called for an attention node that is replaced as in the micro-batch before.
    void note_changed(int layer) noexcept;
    // Computes the attention of all sequences for the next layer of the model that reads a layer's
    // K and V, between two nodes.
    void attend(int layer, const DeviceNode& node) noexcept;
    // Throws what was thrown since clear(): GraphError for an unexpected graph.
    void check_step() const;
    // Commits the steps of all stores without drafts. Throws as DeviceStore::commit_step() does.
    void commit();

private:
    template <typename Function>
    void guarded(Function function) noexcept;
    void check_tokens(const DeviceNode& node) const;
    bool can_read_singles() const;

    std::vector<DeviceStore*> parts_;
    // Says where runs of neighbouring places begin, and where the last one ends; one node computes
    // attention for each run.
    std::vector<std::size_t> runs_;
    // Says what the nodes of the last steps of single tokens depend on: the sequences with their
    // rows, and the layout of masks. Empty: the last step was not one of single tokens.
    std::vector<std::pair<const DeviceStore*, std::size_t>> layout_;
    int n_tokens_ = 0;
    bool in_graph_ = false;
    std::exception_ptr fault_;
};

// Changes the nodes of llama.cpp's graph, or leaves them out.
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

    // Describes a node that was looked at in the last step that changed the graph.
    struct Seen {
        const ggml_tensor* node;
        const void* source;     // where the node's first source lay
        int attends;            // number of the layer whose attention the node computes; -1: none
        std::size_t n_changes;  // how many changes were made up to this node
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
