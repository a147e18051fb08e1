#include "llama/node_times.hpp"

#include <algorithm>

#include "llama/graph_nodes.hpp"
#include "llama/product_hook.hpp"

namespace entropykv {
namespace {

bool computes_nothing(const ggml_tensor* node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: return true;
        default: return false;
    }
}

// Tells whether a node writes to llama.cpp's cache or attends to it, or is our replacement of such
// a node.
bool is_attention(const ggml_tensor* node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT && node->op != GGML_OP_SET_ROWS &&
        node->op != GGML_OP_CUSTOM)
        return false;
    const auto of_cache = [](const ggml_tensor* tensor) {
        return cache_layer_of(tensor, kCacheK) >= 0 || cache_layer_of(tensor, kCacheV) >= 0;
    };
    return of_cache(node) || of_cache(node->src[1]);
}

Work work_of(const ggml_tensor* node) {
    if (is_attention(node)) return Work::attention;
    const bool is_weights = is_product(node) || node->op == GGML_OP_MUL_MAT_ID;
    return is_weights ? Work::weights : Work::rest;
}

std::size_t index(Work work) { return static_cast<std::size_t>(work); }

}  // namespace

void NodeTimes::measure(bool on) {
    measures_ = on;
    times_ = {};
    nodes_ = {};
    idle_.clear();
}

void NodeTimes::end(const ggml_tensor* node) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    if (computes_nothing(node)) {
        idle_.push_back(seconds);
        return;
    }
    const Work work = work_of(node);
    WorkTime& time = times_[index(work)];
    time.seconds += seconds;
    ++nodes_[index(work)];
    if (work != Work::weights) return;
    const ggml_tensor* weights = node->src[0];
    const double rows = static_cast<double>(node->ne[1] * node->ne[2] * node->ne[3]);
    time.operations += 2.0 * static_cast<double>(weights->ne[0] * node->ne[0]) * rows;
    // Each expert is one matrix, and multiplies its own tokens.
    const auto matrices = static_cast<double>(weights->ne[2]);
    time.bytes += static_cast<double>(ggml_nbytes(weights)) * std::min(1.0, rows / matrices);
}

WorkTime NodeTimes::of(Work work) const {
    WorkTime time = times_[index(work)];
    if (idle_.empty()) return time;
    std::vector<double> idle = idle_;
    const auto middle = idle.begin() + static_cast<std::ptrdiff_t>(idle.size() / 2);
    std::nth_element(idle.begin(), middle, idle.end());
    time.seconds = std::max(0.0, time.seconds - *middle * nodes_[index(work)]);
    return time;
}

}  // namespace entropykv
