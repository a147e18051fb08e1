// Changes nodes of llama.cpp's graph for one computation. A node becomes another operation, whose
// sources and result may lie in other memory of the same device; afterwards all nodes are as they
// were, since llama.cpp may use its graph again.
#pragma once

#include <ggml.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace entropykv {

class NodeChanges {
public:
    // Lets a node compute what `operation` says, a tensor of another context that exists until
    // undo(). Throws std::bad_alloc.
    void become(ggml_tensor* node, const ggml_tensor* operation) {
        before_.emplace_back(node, *node);
        node->type = operation->type;
        node->op = operation->op;
        std::copy(operation->ne, operation->ne + GGML_MAX_DIMS, node->ne);
        std::copy(operation->nb, operation->nb + GGML_MAX_DIMS, node->nb);
        std::memcpy(node->op_params, operation->op_params, sizeof node->op_params);
        std::copy(operation->src, operation->src + GGML_MAX_SRC, node->src);
        // A view in a context without a graph does not know its buffer, which RPC asks for.
        for (ggml_tensor* source : operation->src)
            if (source != nullptr && source->buffer == nullptr && source->view_src != nullptr)
                source->buffer = source->view_src->buffer;
        node->view_src = operation->view_src;
        node->view_offs = operation->view_offs;
        node->data = operation->data;
        node->buffer =
            operation->view_src != nullptr ? operation->view_src->buffer : operation->buffer;
    }
    // Must be called while the graph exists.
    void undo() noexcept {
        for (const auto& [node, as_it_was] : before_) *node = as_it_was;
        before_.clear();
    }

private:
    std::vector<std::pair<ggml_tensor*, ggml_tensor>> before_;
};

}  // namespace entropykv
