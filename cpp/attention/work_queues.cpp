#include "attention/work_queues.hpp"

#include <algorithm>
#include <numeric>

#include "platform/relax.hpp"

namespace entropykv {

UnitQueue::UnitQueue(int n_heads)
    : first_unit_(index(n_heads + 1)),
      unfinished_units_(std::make_unique<std::atomic<int>[]>(index(n_heads))),
      next_unit_(std::make_unique<std::atomic<int>[]>(index(n_heads))) {}

CommitQueue::CommitQueue(HeadStore& store, int n_threads) : store_(store), next_(index(n_threads)) {
    for (int layer = 0; layer < store.n_layers(); ++layer)
        for (int head = 0; head < store.shape(layer).n_head_kv; ++head) commits_.emplace_back();
}

void CommitQueue::begin(int n_text) noexcept {
    n_text_ = n_text;
    std::iota(next_.begin(), next_.end(), 0);
    before_ = so_far_ = due_ = 0;
    for (Commit& commit : commits_) commit.ready.store(false, std::memory_order_relaxed);
}

void CommitQueue::prepare(const LayerCommits& layer) noexcept {
    n_working_ = layer.n_threads;
    const int done = layer.recalls ? so_far_ : due_;
    before_ = so_far_;
    so_far_ += layer.n_heads;
    const bool waits = layer.n_heads > 0 && !layer.is_last;
    const int left_over = waits ? (so_far_ - done) % layer.n_threads : 0;
    due_ = std::max(before_, so_far_ - left_over);
}

void CommitQueue::add(int layer, int head, const float* observed, float squares) noexcept {
    Commit& commit = commits_[index(before_ + head)];
    commit.layer = layer;
    commit.head = head;
    commit.observed = observed;
    commit.squares = squares;
    commit.ready.store(true, std::memory_order_release);
}

void CommitQueue::run(int limit, int thread) noexcept {
    for (int& next = next_[index(thread)]; next < limit; next += n_working_) {
        const Commit& commit = commits_[index(next)];
        wait_for(commit.ready);
        store_.commit(commit.layer, commit.head, n_text_, commit.observed, nullptr, commit.squares,
                      thread);
    }
}

}  // namespace entropykv
