#include "store/checkpoint.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "store/head_store.hpp"

namespace entropykv {
namespace {

void check(const StoreComponents& components, const Checkpoint& from) {
    if (!from.is_of(components.share.pool()) || from.heads().size() != components.n_heads())
        throw std::invalid_argument("a checkpoint of another pool, or one that was dropped");
}

void check_sharing(const StoreComponents& components) {
    if (components.common.settings.freezing)
        throw std::logic_error("frozen entries cannot be shared");
}

// Returns how many pages must be copied to evict from the heads of a checkpoint. If the checkpoint
// ends, pages that only it owns need no copy.
std::size_t copies_to_evict(const StoreComponents& components, const Checkpoint& from, bool ends) {
    std::size_t number = 0;
    return components.sum_over_heads([&](const Head& head) {
        const CheckpointHead& other = from.heads()[number++];
        if (other.count <= head.budget()) return std::size_t{0};
        std::size_t needed = 0;
        for (std::size_t page = 0; page < head.pages.pages_of(head.budget()); ++page)
            needed += !ends || components.share.is_shared_page(other.pages[page]) ? 1 : 0;
        return needed;
    });
}

}  // namespace

Checkpoint::Checkpoint(std::shared_ptr<StorePool> pool) : pool_(std::move(pool)) {
    pool_->join(*this);
}

Checkpoint::~Checkpoint() {
    drop();
    pool_->leave(*this);
}

void Checkpoint::drop() {
    for (const CheckpointHead& head : heads_)
        for (std::byte* page : head.pages) pool_->pages().release(page);
    heads_.clear();
}

void Checkpoint::take(std::vector<CheckpointHead> heads, std::size_t evicted,
                      std::int32_t whole_from) {
    heads_ = std::move(heads);
    evicted_ = evicted;
    whole_from_ = whole_from;
    for (const CheckpointHead& head : heads_)
        for (const std::byte* page : head.pages) pool_->pages().share(page);
}

std::unique_ptr<Checkpoint> Checkpoint::copy() const {
    auto other = std::make_unique<Checkpoint>(pool_);
    other->take(heads_, evicted_, whole_from_);
    return other;
}

std::size_t Checkpoint::pages() const {
    std::size_t n = 0;
    for (const CheckpointHead& head : heads_) n += head.pages.size();
    return n;
}

std::size_t Checkpoint::own_pages() const {
    std::size_t n = 0;
    for (const CheckpointHead& head : heads_)
        for (const std::byte* page : head.pages) n += pool_->pages().is_shared(page) ? 0 : 1;
    return n;
}

bool Checkpoint::is_lost() const {
    PagePool& pool = pool_->pages();
    if (!pool.any_file_changed()) return false;
    for (const CheckpointHead& head : heads_)
        for (const std::byte* page : head.pages)
            if (pool.is_changed(page)) return true;
    return false;
}

std::size_t Checkpoint::copied_bytes() const {
    std::size_t bytes = 0;
    for (const CheckpointHead& head : heads_)
        bytes +=
            head.importance.size() * sizeof(float) + (head.dropped ? sizeof(DroppedScores) : 0);
    return bytes;
}

std::size_t Checkpoint::entries() const {
    std::size_t n = 0;
    for (const CheckpointHead& head : heads_) n += static_cast<std::size_t>(head.count);
    return n;
}

std::unique_ptr<Checkpoint> make_checkpoint(StoreComponents& components) {
    check_sharing(components);
    auto made = std::make_unique<Checkpoint>(components.share.shared_pool());
    std::vector<CheckpointHead> heads;
    heads.reserve(components.n_heads());
    components.for_each_head([&](Head& head) {
        head.pages.share_all();
        heads.push_back(
            {head.pages.all(), head.count(), head.pages.copied_importance(), head.dropped});
    });
    made->take(std::move(heads), components.common.evicted.load(std::memory_order_relaxed),
               components.common.whole_from.load(std::memory_order_relaxed));
    return made;
}

// Everything that allocates comes first, so that running out of memory changes nothing. Then the
// store is emptied, and if the pool has no room for the copies, it stays empty.
bool fork_from(HeadStore& store, Checkpoint& from, bool ends) {
    StoreComponents& components = store.components();
    check(components, from);
    check_sharing(components);
    for (const CheckpointHead& head : from.heads())
        components.most_loaded = std::max(components.most_loaded, head.count);
    components.size_workspaces();
    std::vector<CheckpointHead> taken;
    if (!ends) taken = from.heads();
    store.truncate(0);
    std::size_t number = 0;
    components.for_each_head(
        [&](Head& head) { head.pages.make_room_to_share(from.heads()[number++].pages.size()); });
    const auto needed = [&] { return copies_to_evict(components, from, ends); };
    if (!components.share.pool().make_room(needed)) return false;
    if (ends) taken = from.hand_over();
    number = 0;
    components.for_each_head([&](Head& head) {
        CheckpointHead& other = taken[number++];
        head.pages.take_over(std::move(other.pages), std::move(other.importance));
        head.begin_with(other.count);
        head.dropped = other.dropped;
        components.share.add_used(head.pages.size());
        for (const std::byte* page : head.pages.all())
            if (!ends) components.share.pool().pages().share(page);
    });
    components.common.evicted.store(from.evicted(), std::memory_order_relaxed);
    components.common.whole_from.store(from.whole_from(), std::memory_order_relaxed);
    components.evict_to_budgets();
    return true;
}

const CheckpointHead& checkpoint_head(const StoreComponents& components, const Checkpoint& from,
                                      int layer, int head) {
    check(components, from);
    auto number = static_cast<std::size_t>(head);
    for (int l = 0; l < layer; ++l)
        number += components.layers[static_cast<std::size_t>(l)].heads.size();
    return from.heads().at(number);
}

}  // namespace entropykv
