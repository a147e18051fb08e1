// What a sequence held at a moment, to go on from there: the pages are those of its store, which
// share them until one of the owners writes to a page. Only what changes with every micro-batch is
// a copy: the importance of entries, and the statistics of the queries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "decide/query_statistics.hpp"
#include "store/store_pool.hpp"

namespace entropykv {

class Checkpoint {
public:
    // HeadStore::checkpoint() makes them.
    explicit Checkpoint(std::shared_ptr<StorePool> pool);
    ~Checkpoint();
    Checkpoint(const Checkpoint&) = delete;
    Checkpoint& operator=(const Checkpoint&) = delete;

    // Another one of the same pages.
    std::unique_ptr<Checkpoint> copy() const;
    std::size_t pages() const;
    // Pages that no other owner holds: what the pool has again without it.
    std::size_t own_pages() const;
    std::size_t copied_bytes() const;  // besides the pages
    std::size_t entries() const;
    std::size_t evicted() const { return evicted_; }
    // Gives the pages back; nothing can go on from it any more.
    void drop();
    bool is_dropped() const { return heads_.empty(); }

    // For the pool, which moves pages: see HeadStore::move_pages().
    template <typename Visit>
    void move_pages(Visit visit) {
        for (Head& head : heads_)
            for (std::byte*& page : head.pages) page = visit(page);
    }

private:
    friend class HeadStore;
    struct Head {
        std::vector<std::byte*> pages;
        int count = 0;
        std::vector<float> importance;  // by entry, of whole pages
        QueryStatistics queries{};
    };

    std::shared_ptr<StorePool> pool_;
    std::vector<Head> heads_;  // of all layers
    std::size_t evicted_ = 0;
    std::int32_t whole_from_ = 0;  // see HeadStore::windows_whole_from()
};

}  // namespace entropykv
