#include "store/forks.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "store/head_store.hpp"

namespace entropykv {
namespace {

void check(const StoreParts& parts, const Checkpoint& from) {
    if (!from.is_of(parts.share.pool()) || from.heads().size() != parts.n_heads())
        throw std::invalid_argument("a checkpoint of another pool, or one that was dropped");
}

void check_sharing(const StoreParts& parts) {
    if (parts.common.settings.freezing) throw std::logic_error("frozen entries cannot be shared");
}

// Copies that evicting from the heads of a checkpoint needs. Where it ends, what nobody else owns
// needs none.
std::size_t copies_to_evict(const StoreParts& parts, const Checkpoint& from, bool ends) {
    std::size_t number = 0;
    return parts.total([&](const Head& head) {
        const CheckpointHead& other = from.heads()[number++];
        if (other.count <= head.budget()) return std::size_t{0};
        std::size_t needed = 0;
        for (std::size_t page = 0; page < head.pages.pages_of(head.budget()); ++page)
            needed += !ends || parts.share.is_foreign(other.pages[page]) ? 1 : 0;
        return needed;
    });
}

}  // namespace

std::unique_ptr<Checkpoint> make_checkpoint(StoreParts& parts) {
    check_sharing(parts);
    auto made = std::make_unique<Checkpoint>(parts.share.shared_pool());
    std::vector<CheckpointHead> heads;
    heads.reserve(parts.n_heads());
    parts.over_heads([&](Head& head) {
        head.pages.share_all();
        heads.push_back({head.pages.all(), head.count(), head.pages.copied_importance(),
                         head.queries, head.dropped});
    });
    made->take(std::move(heads), parts.common.evicted.load(std::memory_order_relaxed),
               parts.common.whole_from.load(std::memory_order_relaxed));
    return made;
}

// What allocates comes before anything changes, and what changes the store allocates nothing: where
// memory is short, it holds what it held, or, where room could not be made, nothing.
bool go_on_from(HeadStore& store, Checkpoint& from, bool ends) {
    StoreParts& parts = store.parts();
    check(parts, from);
    check_sharing(parts);
    for (const CheckpointHead& head : from.heads())
        parts.most_loaded = std::max(parts.most_loaded, head.count);
    parts.size_workspaces();
    std::vector<CheckpointHead> taken;
    if (!ends) taken = from.heads();
    store.truncate(0);
    std::size_t number = 0;
    parts.over_heads(
        [&](Head& head) { head.pages.make_room_to_share(from.heads()[number++].pages.size()); });
    const auto needed = [&] { return copies_to_evict(parts, from, ends); };
    if (!parts.share.pool().make_room(needed)) return false;
    if (ends) taken = from.hand_over();
    number = 0;
    parts.over_heads([&](Head& head) {
        CheckpointHead& other = taken[number++];
        head.pages.take_over(std::move(other.pages), std::move(other.importance));
        head.begin_with(other.count);
        head.queries = std::move(other.queries);
        head.dropped = other.dropped;
        parts.share.add_used(head.pages.size());
        for (const std::byte* page : head.pages.all())
            if (!ends) parts.share.pool().pages().share(page);
    });
    parts.common.evicted.store(from.evicted(), std::memory_order_relaxed);
    parts.common.whole_from.store(from.whole_from(), std::memory_order_relaxed);
    parts.keep_budgets();
    return true;
}

const CheckpointHead& head_of(const StoreParts& parts, const Checkpoint& from, int layer,
                              int head) {
    check(parts, from);
    auto number = static_cast<std::size_t>(head);
    for (int l = 0; l < layer; ++l)
        number += parts.layers[static_cast<std::size_t>(l)].heads.size();
    return from.heads().at(number);
}

}  // namespace entropykv
