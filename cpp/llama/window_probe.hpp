// Looks at the graph of one decode of a single token: how many cells of the cache each attention
// layer lets it see. llama.cpp says whether a model has windows, but not which of its layers.
#pragma once

#include <utility>
#include <vector>

struct ggml_tensor;

namespace entropykv {

class WindowProbe {
public:
    WindowProbe() = default;
    WindowProbe(const WindowProbe&) = delete;
    WindowProbe& operator=(const WindowProbe&) = delete;

    // For llama_context_params.cb_eval and cb_eval_user_data; valid as long as this object.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data);

    // N of cache_k_l<N>, and cells seen; -1 where the mask cannot be read. Of all attention nodes
    // since clear().
    const std::vector<std::pair<int, int>>& visible() const { return visible_; }
    void clear() { visible_.clear(); }

private:
    std::vector<std::pair<int, int>> visible_;
};

}  // namespace entropykv
