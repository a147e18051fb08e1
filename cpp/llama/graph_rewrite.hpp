// Changes the graphs of a llama.cpp context so that the sequences of a micro-batch attend with
// their own stores: on the CPU (headwise_rewrite.hpp) or on devices (device_rewrite.hpp).
#pragma once

#include <ggml.h>

#include <atomic>

namespace entropykv {

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
    // Is called after the graph was computed up to a node. Returns whether the node's attention was
    // computed instead of it.
    virtual bool attend_instead(ggml_tensor*) { return false; }
    // Must be called while the graph of the step exists.
    virtual void end_step() {}
    // Throws std::runtime_error if the step did not compute what it had to.
    virtual void check_step() {}
    // Returns how many nodes a step must have changed, and how many it has.
    virtual int n_expected() const = 0;
    int n_served() const { return served_; }

protected:
    static constexpr const char* kUnknownNode =
        "a graph has an attention node that the first one did not have";

    std::atomic<const char*>& fault_;
    int served_ = 0;
};

}  // namespace entropykv
