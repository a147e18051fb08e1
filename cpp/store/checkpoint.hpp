// What a sequence held at a moment, to go on from there: the pages are those of its store, which
// share them until one of the owners writes to a page. Only what changes with every micro-batch is
// a copy: the importance of entries, and the statistics of the queries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "decide/dropped_scores.hpp"
#include "decide/query_statistics.hpp"
#include "store/store_pool.hpp"

namespace entropykv {

// A KV head as it was.
struct CheckpointHead {
    std::vector<std::byte*> pages;
    int count = 0;
    std::vector<float> importance;  // by entry, of whole pages
    QueryStatistics queries{};
    std::optional<DroppedScores> dropped{};
};

class Checkpoint {
public:
    // make_checkpoint() makes them: see forks.hpp.
    explicit Checkpoint(std::shared_ptr<StorePool> pool);
    ~Checkpoint();
    Checkpoint(const Checkpoint&) = delete;
    Checkpoint& operator=(const Checkpoint&) = delete;

    // Becomes another owner of the pages of heads, of all layers.
    void take(std::vector<CheckpointHead> heads, std::size_t evicted, std::int32_t whole_from);
    // Another one of the same pages.
    std::unique_ptr<Checkpoint> copy() const;
    // Gives the pages back; nothing can go on from it any more.
    void drop();
    // The same, where somebody else is their owner from now on.
    std::vector<CheckpointHead> hand_over() noexcept { return std::exchange(heads_, {}); }
    bool is_dropped() const { return heads_.empty(); }

    bool is_of(const StorePool& pool) const { return pool_.get() == &pool; }
    const std::vector<CheckpointHead>& heads() const { return heads_; }
    std::size_t evicted() const { return evicted_; }
    std::int32_t whole_from() const { return whole_from_; }  // HeadStore::windows_whole_from()
    std::size_t pages() const;
    // Pages that no other owner holds: what the pool has again without it.
    std::size_t own_pages() const;
    std::size_t copied_bytes() const;  // besides the pages
    std::size_t entries() const;

    // For the pool, which moves pages: visit(page) returns where it is from now on.
    template <typename Visit>
    void move_pages(Visit visit) {
        for (CheckpointHead& head : heads_)
            for (std::byte*& page : head.pages) page = visit(page);
    }

private:
    std::shared_ptr<StorePool> pool_;
    std::vector<CheckpointHead> heads_;  // of all layers
    std::size_t evicted_ = 0;
    std::int32_t whole_from_ = 0;
};

}  // namespace entropykv
