// Changes nodes of llama.cpp's graph for one computation. A node becomes another operation, whose
// sources and result may lie in other memory of the same device; afterwards all nodes are as they
// were, since llama.cpp may use its graph again. Then the changes can be repeated.
#pragma once

#include <ggml.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

namespace entropykv {

class NodeChanges {
public:
    // Turns a node into `operation`, a tensor of another context, which must exist as long as the
    // change may be repeated. Throws std::bad_alloc.
    void become(ggml_tensor* node, const ggml_tensor* operation) {
        changes_.push_back({node, *node, {}});
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
        changes_.back().after = *node;
        n_made_ = changes_.size();
    }
    // Repeats the changes of the last computation up to number `until`. Returns false, and changes
    // nothing, if a node is not as it was then.
    bool repeat(std::size_t until) noexcept {
        for (std::size_t i = n_made_; i < until; ++i)
            if (std::memcmp(changes_[i].node, &changes_[i].before, sizeof(ggml_tensor)) != 0)
                return false;
        for (; n_made_ < until; ++n_made_) *changes_[n_made_].node = changes_[n_made_].after;
        return true;
    }
    // Returns how many changes there are, those that can be repeated included.
    std::size_t size() const { return changes_.size(); }
    // Undoes all changes. Must be called while the graph exists.
    void undo() noexcept {
        for (std::size_t i = 0; i < n_made_; ++i) *changes_[i].node = changes_[i].before;
        n_made_ = 0;
    }
    // Forgets all changes, so that none can be repeated. They must have been undone.
    void forget() noexcept { changes_.clear(); }

private:
    struct Change {
        ggml_tensor* node;
        ggml_tensor before;
        ggml_tensor after;
    };

    std::vector<Change> changes_;
    std::size_t n_made_ = 0;
};

}  // namespace entropykv
