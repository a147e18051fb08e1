// Says which of ggml's threads does what: UnitQueue gives them the units of work of a layer, one
// after another, and CommitQueue the heads to commit when a single token is read.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "store/head_store.hpp"

namespace entropykv {

// Holds the units of one reader of a layer that no thread has claimed yet.
class UnitQueue {
public:
    // Says where a thread looks for its next unit.
    struct Cursor {
        bool others = false;
        int head = 0;
    };

    explicit UnitQueue(int n_heads);

    // Must be called before a layer; units_of(head) returns how many units a KV head has.
    template <typename UnitsOf>
    void fill(UnitsOf units_of) noexcept {
        int units = 0;
        for (int h = 0; h < n_heads(); ++h) {
            const int of_head = units_of(h);
            first_unit_[index(h)] = units;
            unfinished_units_[index(h)].store(of_head, std::memory_order_relaxed);
            next_unit_[index(h)].store(units, std::memory_order_relaxed);
            units += of_head;
        }
        first_unit_[index(n_heads())] = units;
        unfinished_heads_.store(n_heads(), std::memory_order_relaxed);
    }

    // Claims a unit of the heads that this thread owns, or else of another head; -1 if there is
    // none left.
    template <typename Owns>
    int claim(Cursor& cursor, Owns owns) noexcept {
        while (true) {
            for (; cursor.head < n_heads(); ++cursor.head) {
                if (owns(cursor.head) == cursor.others) continue;
                std::atomic<int>& next = next_unit_[index(cursor.head)];
                const int unit = next.fetch_add(1, std::memory_order_relaxed);
                if (unit < first_unit_[index(cursor.head + 1)]) return unit;
            }
            if (cursor.others) return -1;
            cursor = {true, 0};
        }
    }

    int first_unit(int head) const { return first_unit_[index(head)]; }
    int head_of(int unit) const {
        int head = 0;
        while (unit >= first_unit_[index(head + 1)]) ++head;
        return head;
    }

    // ends_head() is called after each unit, and tells whether it was the last one of its head;
    // ends_layer() is called after each head, and tells whether it was the last one of the layer.
    bool ends_head(int head) noexcept {
        return unfinished_units_[index(head)].fetch_sub(1, std::memory_order_acq_rel) == 1;
    }
    bool ends_layer() noexcept {
        return unfinished_heads_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    }

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    int n_heads() const { return static_cast<int>(first_unit_.size()) - 1; }

    std::vector<int> first_unit_;  // first unit of each head, then the number of units
    std::unique_ptr<std::atomic<int>[]> unfinished_units_;
    std::unique_ptr<std::atomic<int>[]> next_unit_;  // next unit of each head
    std::atomic<int> unfinished_heads_{0};
};

// When a single token is read, heads wait here until their own thread commits them. If the number
// of heads is no multiple of the number of threads, the remaining heads wait for the next layer, so
// that all threads have equally much to do. They cannot wait longer, because the next layer but one
// overwrites what was staged and observed.
class CommitQueue {
public:
    CommitQueue(HeadStore& store, int n_threads);

    // Must be called before a micro-batch of n_text tokens.
    void begin(int n_text) noexcept;

    // Says what a layer adds to the queue.
    struct LayerCommits {
        int n_heads;  // heads that will be queued; 0: they are committed at once
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

    // run_before() and run_due() commit heads that belong to this thread: run_before() the heads of
    // the layers before this one, run_due() the heads that must not wait for the next layer. If a
    // head of this layer is not ready yet, the thread that attends to it does not wait for anybody,
    // so this cannot deadlock.
    void run_before(int thread) noexcept { run(before_, thread); }
    void run_due(int thread) noexcept { run(due_, thread); }

private:
    // Names a head that was attended to, and what its queries observed.
    struct Commit {
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
