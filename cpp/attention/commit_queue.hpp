// When a single token is read, heads wait here until their own thread commits them. If the number
// of heads is no multiple of the number of threads, the remaining heads wait for the next layer, so
// that all threads have equally much to do. They cannot wait longer, because the next layer but one
// overwrites what was staged and observed.
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

    // Must be called before a micro-batch of n_text tokens.
    void begin(int n_text) noexcept;

    struct LayerCommits {  // is what a layer adds to the queue
        int n_heads;       // heads that will be queued; 0: they are committed at once
        bool is_last;
        bool recalls;  // whether run_before() is called before the layer's units are claimed
        int n_threads;
    };
    void prepare(const LayerCommits& layer) noexcept;

    // Tells whether a head of the layer belongs to this thread. That thread attends to the head
    // first, recalls for it and commits it, so that the head's entries are in the cache of one
    // core.
    bool owns(int head, int thread) const noexcept {
        return (before_ + head) % n_working_ == thread;
    }

    // Queues a head of the layer that was attended to.
    void add(int layer, int head, const float* observed, float squares) noexcept;

    // Both commit heads that belong to this thread: run_before() those of the layers before this
    // one, run_due() those that must not wait for the next layer. If a head of this layer is not
    // ready yet, the thread that attends to it does not wait for anybody, so this cannot deadlock.
    void run_before(int thread) noexcept { run(before_, thread); }
    void run_due(int thread) noexcept { run(due_, thread); }

private:
    struct Commit {  // is one head that was attended to
        int layer = 0;
        int head = 0;
        const float* observed = nullptr;
        float squares = 0.0f;  // sum over the head's outputs, if losses are measured
        std::atomic<bool> ready{false};
    };

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    void run(int limit, int thread) noexcept;

    HeadStore& store_;
    int n_text_ = 0;
    std::deque<Commit> commits_;  // one for every head, in the order of the layers
    std::vector<int> next_;       // the next commit of each thread
    int n_working_ = 1;           // threads that share the heads
    int before_ = 0;              // heads of the layers before this one
    int so_far_ = 0;              // heads up to this layer
    int due_ = 0;                 // heads that must be committed when this layer ends
};

}  // namespace entropykv
