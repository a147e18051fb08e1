// A checkpoint is what a sequence held at a moment, kept to continue from there; a fork is a store
// that continues. The store of the sequence, the checkpoint and the fork own the same pages, and a
// page is copied when one of its owners has to write to it: see HeadPages. Only what every
// micro-batch changes is copied at once: the importance of entries, and the scores of those that
// were dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "decide/dropped_scores.hpp"
#include "store/store_components.hpp"

namespace entropykv {

class HeadStore;

// Describes a KV head at the moment of a checkpoint.
struct CheckpointHead {
    std::vector<std::byte*> pages;
    int count = 0;
    std::vector<float> importance;  // also for empty slots of the last page
    std::optional<DroppedScores> dropped{};
};

class Checkpoint {
public:
    // Makes a checkpoint without pages, for take(); use make_checkpoint() or copy().
    explicit Checkpoint(std::shared_ptr<StorePool> pool);
    ~Checkpoint();
    Checkpoint(const Checkpoint&) = delete;
    Checkpoint& operator=(const Checkpoint&) = delete;

    // Becomes another owner of the pages of the heads of all layers.
    void take(std::vector<CheckpointHead> heads, std::size_t evicted, std::int32_t whole_from);
    std::unique_ptr<Checkpoint> copy() const;
    // Gives the pages back; no store can continue from this checkpoint any more.
    void drop();
    // Hands the ownership of the pages to the caller, and becomes a dropped checkpoint.
    std::vector<CheckpointHead> hand_over() noexcept { return std::exchange(heads_, {}); }
    bool is_dropped() const { return heads_.empty(); }

    bool is_of(const StorePool& pool) const { return pool_.get() == &pool; }
    const std::vector<CheckpointHead>& heads() const { return heads_; }
    std::size_t evicted() const { return evicted_; }
    // Returns what HeadStore::windows_whole_from() returned when the checkpoint was made.
    std::int32_t whole_from() const { return whole_from_; }
    std::size_t pages() const;
    // Returns how many pages nobody else owns. They become free when the checkpoint is dropped.
    std::size_t own_pages() const;
    // Tells whether pages are in a mapped file that someone has changed.
    bool is_lost() const;
    std::size_t copied_bytes() const;  // counts what is not in pages
    std::size_t entries() const;

    // Replaces the address of every page by what visit(page) returns, after the pool has moved
    // pages.
    template <typename Visit>
    void move_pages(Visit visit) {
        for (CheckpointHead& head : heads_)
            for (std::byte*& page : head.pages) page = visit(page);
    }

private:
    std::shared_ptr<StorePool> pool_;
    std::vector<CheckpointHead> heads_;  // heads of all layers
    std::size_t evicted_ = 0;
    std::int32_t whole_from_ = 0;
};

// Returns a checkpoint of what the store holds now. Must be called between micro-batches, and
// throws std::logic_error if the store freezes entries.
std::unique_ptr<Checkpoint> make_checkpoint(StoreComponents& components);

// Replaces the entries of the store by those of a checkpoint of the same pool, and evicts what
// exceeds the budgets. If `ends` is true, the checkpoint is dropped, and pages that only it owned
// need not be copied. Returns false if the pool has no room for the copies: then the store is empty
// and the checkpoint unchanged. Throws std::invalid_argument if the checkpoint belongs to another
// pool or was dropped, and std::logic_error if the store freezes entries.
bool fork_from(HeadStore& store, Checkpoint& from, bool ends);

// Returns a KV head of a checkpoint of the same pool. Throws std::invalid_argument as fork_from().
const CheckpointHead& checkpoint_head(const StoreComponents& components, const Checkpoint& from,
                                      int layer, int head);

}  // namespace entropykv
