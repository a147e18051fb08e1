// Measures where the time of llama.cpp's graphs goes: each node is computed alone, and its time
// counts as weights, attention or rest. Nodes of llama.cpp and our ops are timed in the same way,
// so that they can be compared. Computing a node alone takes extra time to start and join the
// threads. The median time of nodes that compute nothing is therefore subtracted from every node.
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
    // Counts the operations of products of weights; a multiplication and an addition are two.
    double operations = 0.0;
    double bytes = 0.0;  // counts the weights that were read
};

class NodeTimes {
public:
    // Starts measuring from 0, or stops: then graphs are computed as a whole again.
    void measure(bool on);
    bool measures() const { return measures_; }

    // Both are called around the computation of a node. An evaluation callback returns what begin()
    // returns, whether to compute the node alone, and calls end() afterwards.
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
