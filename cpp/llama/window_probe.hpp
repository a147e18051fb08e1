// Finds out how many cells of the cache each attention layer lets a token see, from the graph of
// decoding a single token. llama.cpp says whether a model has windows, but not which layers have
// them.
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

    // Serves as llama_context_params.cb_eval, with this object as cb_eval_user_data. The object
    // must outlive the context.
    static bool on_node(ggml_tensor* node, bool ask, void* user_data);

    // Returns (N of cache_k_l<N>, visible cells) for all attention nodes since clear(); -1 cells:
    // the mask could not be read.
    const std::vector<std::pair<int, int>>& visible() const { return visible_; }
    void clear() { visible_.clear(); }

private:
    std::vector<std::pair<int, int>> visible_;
};

}  // namespace entropykv
