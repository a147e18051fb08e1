// Heads of single tokens that wait to be committed, each by its own thread: what is left over where
// heads are no multiple of the threads waits for the next layer, so that all threads have as much
// to do. (Not longer: what was staged and observed is still there then.)
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <vector>

#include "store/head_store.hpp"

namespace entropykv {

class CommitQueue {
public:
    CommitQueue(HeadStore& store, int n_threads);

    // Before a micro-batch of n_text tokens.
    void begin(int n_text) noexcept;

    struct Turn {     // of a layer
        int n_heads;  // that will be queued; 0: its heads are committed at once
        bool is_last;
        bool recalls;  // run_before() comes before its units are claimed
        int n_threads;
    };
    void prepare(const Turn& turn) noexcept;

    // Whether a head of the layer is this thread's: what it holds is then in the cache of one core.
    // It is looked through and committed by this thread, and attended to first.
    bool owns(int head, int thread) const noexcept {
        return (before_ + head) % n_working_ == thread;
    }

    // A head of the layer was attended to.
    void add(int layer, int head, const float* observed, float squares) noexcept;

    // Commits the thread's own heads of the layers before; or what must not wait for the next
    // layer. Those of this layer become ready without anybody's waiting.
    void run_before(int thread) noexcept { run(before_, thread); }
    void run_due(int thread) noexcept { run(due_, thread); }

private:
    struct Commit {  // of a head that was attended to
        int layer = 0;
        int head = 0;
        const float* observed = nullptr;
        float squares = 0.0f;  // of the outputs, where they are measured
        std::atomic<bool> ready{false};
    };

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    void run(int limit, int thread) noexcept;

    HeadStore& store_;
    int n_text_ = 0;
    std::deque<Commit> commits_;  // as many as there are heads, in the order of the layers
    std::vector<int> next_;       // of each thread
    int n_working_ = 1;           // threads
    int before_ = 0;              // of the layers before
    int so_far_ = 0;              // with this layer
    int due_ = 0;                 // when this layer ends
};

}  // namespace entropykv
