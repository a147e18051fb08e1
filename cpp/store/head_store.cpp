#include "store/head_store.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "store/frozen_heads.hpp"

namespace entropykv {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

// How many pages a micro-batch needs, copies of what others own, too, included.
std::size_t pages_to_read(const StoreParts& parts, int n_tokens) {
    return parts.total([&](const Head& head) {
        const std::size_t wanted = head.pages.pages_of(head.upcoming);
        std::size_t n = wanted > head.pages.size() ? wanted - head.pages.size() : 0;
        if (n_tokens > 0) n += head.pages.foreign(head.first_written(n_tokens), head.pages.size());
        return n;
    });
}

// How many copies evicting to smaller budgets can need, at most.
std::size_t copies_to_evict(const StoreParts& parts, const std::vector<int>& budgets) {
    std::size_t next = 0;
    return parts.total([&](const Head& head) {
        const int budget = budgets[next++];
        return head.count() > budget ? head.pages.foreign(0, head.pages.pages_of(budget)) : 0;
    });
}

// Returns how many pages they take.
std::size_t check_budgets(const StoreParts& parts, const std::vector<int>& budgets,
                          const Protection& protection) {
    const StoreSettings& settings = parts.common.settings;
    if (budgets.size() < parts.n_heads()) throw std::invalid_argument("too few budgets");
    std::size_t next = 0;
    const std::size_t pages = parts.total([&](const Head& head) {
        const int budget = budgets[next++];
        if (budget > settings.max_entries || budget < 1)
            throw std::invalid_argument("a budget outside of 1 .. max_entries");
        const std::int64_t least =
            std::min<std::int64_t>(std::int64_t{protection.n_sinks} + protection.recent_window,
                                   most_entries(head.shape(), settings.max_entries));
        if (!settings.own_windows && budget < least)
            throw std::invalid_argument("a budget below sinks + recent window");
        return head.pages.pages_of(budget);
    });
    if (next != budgets.size()) throw std::invalid_argument("too many budgets");
    return pages;
}

std::size_t copies_to_truncate(StoreParts& parts, std::int32_t position) {
    std::uint8_t* mask = parts.workspaces.front().ranking.mask();
    return parts.total([&](const Head& head) {
        if (!head.pages.any_shared()) return std::size_t{0};
        head.mark_before(position, mask);
        return head.foreign_holes(mask);
    });
}

}  // namespace

HeadStore::HeadStore(const std::vector<LayerShape>& layers, const StoreSettings& settings,
                     std::shared_ptr<StorePool> pool)
    : parts_(layers, settings, std::move(pool)) {
    if (settings.freezing) FrozenHeads(parts_).start();
    set_workers(1, kKernelsPortable);
    parts_.share.pool().join(*this);
}

HeadStore::~HeadStore() {
    parts_.over_heads([](Head& head) { head.pages.drop(0); });
    parts_.share.pool().leave(*this, share().budget());
}

void HeadStore::set_workers(int n_workers, const KernelTable& kernels) {
    parts_.common.kernels = &kernels;
    const std::size_t n = index(std::max(n_workers, 1));
    while (parts_.workspaces.size() > n) parts_.workspaces.pop_back();
    while (parts_.workspaces.size() < n) parts_.workspaces.emplace_back(parts_.common);
    parts_.size_workspaces();
}

void HeadStore::give_up_share() {
    if (share().used() > 0) throw std::logic_error("a store that holds pages needs its share");
    parts_.share.set(0);
}

void HeadStore::set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                            const Protection& protection) {
    check_protection(protection);
    if (pool_pages > std::numeric_limits<std::size_t>::max() / share().page_bytes())
        throw std::invalid_argument("more pages than memory has addresses");
    if (check_budgets(parts_, budgets, protection) > pool_pages)
        throw std::invalid_argument("the budgets exceed the pool");
    share().check(pool_pages);

    std::size_t first = 0;
    parts_.over_heads([&](Head& head) {
        const int budget = budgets[first++];
        if (head.frozen && head.count() > budget) head.frozen.cold->prepare(head.count() - budget);
    });
    parts_.share.pool().make_room([&] { return copies_to_evict(parts_, budgets); });
    parts_.size_workspaces(*std::max_element(budgets.begin(), budgets.end()));
    parts_.common.settings.protection = protection;
    std::size_t next = 0;
    parts_.over_heads([&](Head& head) { head.set_budget(budgets[next++]); });
    parts_.keep_budgets();
    parts_.share.set(pool_pages);
    parts_.size_workspaces();
}

void HeadStore::reserve(int n_tokens, std::int32_t newest, bool recalls, int n_echo) {
    if (n_tokens < 0 || n_echo < 0 || n_tokens + n_echo < 1 ||
        n_tokens > settings().max_tokens - n_echo)
        throw std::invalid_argument("a micro-batch outside of 1 .. max_tokens");
    parts_.common.newest = newest;
    parts_.common.single_query = n_tokens + n_echo == 1;
    parts_.most_loaded = 0;
    parts_.look_at_features();
    if (parts_.collects_lessons()) parts_.size_workspaces();
    FrozenHeads frozen(parts_);
    parts_.over_heads([&](Head& head) {
        const int due = frozen.prepare(head, n_tokens);
        const int restored = due + (recalls ? Recall::most(head) : 0);
        head.upcoming = std::min(head.budget(), head.count() + n_tokens + restored);
    });
    parts_.share.pool().make_room([&] { return pages_to_read(parts_, n_tokens); });
    parts_.over_heads([&](Head& head) {
        if (parts_.common.schedule) head.pages.drop(head.upcoming);
        if (n_tokens > 0) head.pages.own_from(head.first_written(n_tokens));
        head.pages.grow(head.upcoming);
        head.size_frozen();
    });
}

void HeadStore::recall(int layer, int head, int n_staged, const QueryRows& queries,
                       std::int32_t now, int workspace) noexcept {
    Workspace& own = parts_.workspaces[index(workspace)];
    own.recall.run(parts_.layers[index(layer)].heads[index(head)], n_staged, queries, now,
                   own.page_read.data());
}

void HeadStore::commit(int layer, int head_index, int n_staged, const float* observed,
                       const float* looked_up, float output_squares, int workspace) noexcept {
    Head& head = parts_.layers[index(layer)].heads[index(head_index)];
    Workspace& own = parts_.workspaces[index(workspace)];
    const StagedEntries staged{staging(layer, head_index), n_staged};
    if (looked_up != nullptr) {
        if (parts_.collects_lessons())
            parts_.teach(index(layer), index(head_index), staged, looked_up + head.count(), own);
        own.ranking.note_looked_up(head, staged, looked_up);
    }
    const bool scheduled = parts_.common.schedule && head.frozen && observed != nullptr;
    if (observed != nullptr) own.ranking.add_observed(head, staged, observed);
    if (scheduled)
        own.schedule.follow(head, n_staged, observed, own.ranking.mask(), own.page_read.data());
    own.keeper.take_in(head, staged, output_squares);
    if (scheduled) own.schedule.restore_due(head, own.page_read.data());
}

void HeadStore::truncate(std::int32_t position) {
    if (position < 0) throw std::invalid_argument("positions begin at 0");
    std::uint8_t* mask = parts_.workspaces.front().ranking.mask();
    parts_.share.pool().make_room([&] { return copies_to_truncate(parts_, position); });
    parts_.common.whole_from.store(std::min(windows_whole_from(), position),
                                   std::memory_order_relaxed);
    parts_.over_heads([&](Head& head) {
        head.mark_before(position, mask);
        head.keep(mask, {}, *parts_.common.kernels);
        head.drop_empty_pages();
        if (head.frozen) head.frozen.cold->truncate(position);
        if (position > 0) return;
        head.queries.reset();
        if (head.dropped) head.dropped->forget();
    });
}

std::size_t HeadStore::entries() const {
    return parts_.total([](const Head& head) { return index(head.count()); });
}

}  // namespace entropykv
