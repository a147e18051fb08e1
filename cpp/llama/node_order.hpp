// Knows the order in which llama.cpp computes the nodes of a layer, from the last write of K or V
// on.
#pragma once

#include <ggml.h>

#include <vector>

namespace entropykv {

class NodeOrder {
public:
    // Must be called for every node of the graph, in the order of the graph.
    void note(ggml_tensor* node);
    // Returns views that only an attention node reads, of those that are computed after the last
    // write and after the queries, in their order. They compute nothing, so they can become other
    // nodes.
    std::vector<ggml_tensor*> slots_of(const ggml_tensor* attention) const;
    void clear() { nodes_.clear(); }

private:
    std::vector<ggml_tensor*> nodes_;
};

}  // namespace entropykv
