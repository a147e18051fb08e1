#include "store/forks.hpp"

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
