// Where the time of llama.cpp's graphs goes: each node is computed by itself, and its time counts
// for weights, attention or the rest. Whoever computes a node, llama.cpp or an op of ours, is timed
// alike, so that both can be compared.
//
// To compute a node by itself takes some time of its own (threads start and wait): the median of
// what nodes took that compute nothing is taken from every node.
#pragma once

#include <ggml.h>

#include <array>
#include <chrono>
#include <vector>

namespace entropykv {

enum class Work { weights, attention, rest };
constexpr int kWorks = 3;

struct WorkTime {
    double seconds = 0.0;
    double operations = 0.0;  // of products of weights: two per multiplication
    double bytes = 0.0;       // of weights that were read
};

class NodeTimes {
public:
    // Begins anew, or ends: from then on graphs are computed as a whole again.
    void measure(bool on);
    bool measures() const { return measures_; }

    // Around the computation of a node. begin() says whether the node is to be computed by itself:
    // an evaluation callback returns that, and calls end() when it is done.
    bool begin() {
        if (measures_) start_ = Clock::now();
        return measures_;
    }
    void end(const ggml_tensor* node);

    WorkTime of(Work work) const;

private:
    using Clock = std::chrono::steady_clock;
    bool measures_ = false;
    Clock::time_point start_;
    std::array<WorkTime, kWorks> times_;
    std::array<int, kWorks> nodes_{};
    std::vector<double> idle_;  // seconds of nodes that compute nothing
};

}  // namespace entropykv
