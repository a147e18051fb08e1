#include "store/head_store.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "store/frozen_heads.hpp"

namespace entropykv {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

// Returns how many pages a micro-batch needs, including copies of shared pages.
std::size_t pages_to_read(const StoreComponents& components, int n_tokens) {
    return components.sum_over_heads([&](const Head& head) {
        const std::size_t wanted = head.pages.pages_of(head.upcoming);
        std::size_t n = wanted > head.pages.size() ? wanted - head.pages.size() : 0;
        if (n_tokens > 0)
            n += head.pages.count_shared(head.first_written(n_tokens), head.pages.size());
        return n;
    });
}

// Returns how many pages must be copied at most to evict to smaller budgets.
std::size_t copies_to_evict(const StoreComponents& components, const std::vector<int>& budgets) {
    std::size_t next = 0;
    return components.sum_over_heads([&](const Head& head) {
        const int budget = budgets[next++];
        return head.count() > budget ? head.pages.count_shared(0, head.pages.pages_of(budget)) : 0;
    });
}

// Throws for impossible budgets; returns how many pages they take.
std::size_t check_budgets(const StoreComponents& components, const std::vector<int>& budgets,
                          const Protection& protection) {
    const StoreSettings& settings = components.common.settings;
    if (budgets.size() < components.n_heads()) throw std::invalid_argument("too few budgets");
    std::size_t next = 0;
    const std::size_t pages = components.sum_over_heads([&](const Head& head) {
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

// An eviction leaves most_decode_room() places at most, so the drafts evict no more than these and
// one more for each draft.
void reserve_undo(Head& head, int n_drafts, int scoring_interval) {
    if (!head.undo) head.undo = std::make_unique<UndoLog>();
    const int n_observed = n_drafts / scoring_interval + 1;
    head.undo->reserve(head, n_drafts, n_observed, most_decode_room(head.budget()) + n_drafts,
                       head.upcoming);
}

// Copies the pages that a micro-batch may write to and that have other owners. Pages behind the
// stored entries belong to the head from now on. A page of stored entries without other owners
// stays marked as shared until an eviction writes to it, so that most pages of a mapped file stay
// shared with other processes.
void own_what_is_written(Head& head, int n_tokens) {
    if (!head.pages.any_shared()) return;
    const auto appended = static_cast<std::size_t>(head.layout().page_of(head.count()));
    for (std::size_t page = head.first_written(n_tokens); page < appended; ++page)
        if (head.pages.count_shared(page, page + 1) > 0) head.pages.own(static_cast<int>(page));
    head.pages.own_from(appended);
}

std::size_t copies_to_truncate(StoreComponents& components, std::int32_t position) {
    std::uint8_t* mask = components.workspaces.front().evictor.mask();
    return components.sum_over_heads([&](const Head& head) {
        if (!head.pages.any_shared()) return std::size_t{0};
        head.mark_before(position, mask);
        return head.count_shared_holes(mask);
    });
}

}  // namespace

HeadStore::HeadStore(const std::vector<LayerShape>& layers, const StoreSettings& settings,
                     std::shared_ptr<StorePool> pool)
    : components_(layers, settings, std::move(pool)) {
    if (settings.freezing) FrozenHeads(components_).start();
    set_workers(1, kKernelsPortable);
    components_.share.pool().join(*this);
}

HeadStore::~HeadStore() {
    components_.for_each_head([](Head& head) { head.pages.drop(0); });
    components_.share.pool().leave(*this, share().budget());
}

void HeadStore::set_workers(int n_workers, const KernelTable& kernels) {
    components_.common.kernels = &kernels;
    const std::size_t n = index(std::max(n_workers, 1));
    while (components_.workspaces.size() > n) components_.workspaces.pop_back();
    while (components_.workspaces.size() < n)
        components_.workspaces.emplace_back(components_.common);
    components_.size_workspaces();
}

void HeadStore::give_up_share() {
    if (share().used() > 0) throw std::logic_error("a store that holds pages needs its share");
    components_.share.set(0);
}

void HeadStore::set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                            const Protection& protection) {
    check_protection(protection);
    if (pool_pages > std::numeric_limits<std::size_t>::max() / share().page_bytes())
        throw std::invalid_argument("more pages than memory has addresses");
    if (check_budgets(components_, budgets, protection) > pool_pages)
        throw std::invalid_argument("the budgets exceed the pool");
    share().check(pool_pages);

    std::size_t first = 0;
    components_.for_each_head([&](Head& head) {
        const int budget = budgets[first++];
        if (head.frozen && head.count() > budget) head.frozen.cold->prepare(head.count() - budget);
    });
    components_.share.pool().require_room([&] { return copies_to_evict(components_, budgets); });
    components_.size_workspaces(*std::max_element(budgets.begin(), budgets.end()));
    components_.common.settings.protection = protection;
    std::size_t next = 0;
    components_.for_each_head([&](Head& head) {
        head.set_budget(budgets[next++]);
        head.undo.reset();
    });
    components_.evict_to_budgets();
    components_.share.set(pool_pages);
    components_.size_workspaces();
}

int HeadStore::most_drafts(int wanted) const {
    const StoreCommon& common = components_.common;
    if (settings().freezing || common.measures_losses()) return 0;
    int most = wanted;
    for (const StoreLayer& layer : components_.layers) {
        if (layer.shape.readers > 1) return 0;
        if (layer.shape.window == 0) continue;
        for (const Head& head : layer.heads)
            most = std::min(most, std::max(0, head.budget() - head.count() - 1));
    }
    return most;
}

void HeadStore::reserve(int n_tokens, std::int32_t newest, bool recalls, int n_echo, int n_drafts) {
    if (n_tokens < 0 || n_echo < 0 || n_tokens + n_echo < 1 ||
        n_tokens > settings().max_tokens - n_echo)
        throw std::invalid_argument("a micro-batch outside of 1 .. max_tokens");
    components_.common.newest = newest;
    components_.common.single_query = n_tokens + n_echo - n_drafts == 1;
    components_.most_loaded = 0;
    components_.prepare_features();
    if (components_.collects_lessons()) components_.size_workspaces();
    FrozenHeads frozen(components_);
    components_.for_each_head([&](Head& head) {
        const int due = frozen.prepare(head, n_tokens);
        const int restored = due + (recalls ? Recall::most(head) : 0);
        head.upcoming = std::min(head.budget(), head.count() + n_tokens + restored);
    });
    components_.share.pool().make_room([&] { return pages_to_read(components_, n_tokens); });
    components_.for_each_head([&](Head& head) {
        if (components_.common.schedule) head.pages.drop(head.upcoming);
        if (n_tokens > 0) own_what_is_written(head, n_tokens);
        head.pages.grow(head.upcoming);
        head.size_frozen();
        if (n_drafts > 0) reserve_undo(head, n_drafts, components_.common.scoring_interval());
    });
}

void HeadStore::recall(int layer, int head, int n_staged, const QueryRows& queries,
                       std::int32_t now, int workspace) noexcept {
    Workspace& own = components_.workspaces[index(workspace)];
    own.recall.run(components_.layers[index(layer)].heads[index(head)], n_staged, queries, now,
                   own.page_read.data());
}

void HeadStore::commit(int layer, int head_index, int n_staged, const float* observed,
                       const float* echo_shares, float output_squares, int workspace) noexcept {
    Head& head = components_.layers[index(layer)].heads[index(head_index)];
    Workspace& own = components_.workspaces[index(workspace)];
    const StagedEntries staged{staging(layer, head_index), n_staged, components_.common.newest};
    if (echo_shares != nullptr) {
        if (components_.collects_lessons())
            components_.add_lessons(index(layer), index(head_index), staged,
                                    echo_shares + head.count(), own);
        own.evictor.raise_predicted_shares(head, staged, echo_shares);
    }
    const bool scheduled = components_.common.schedule && head.frozen && observed != nullptr;
    if (observed != nullptr) own.evictor.add_observed(head, staged, observed);
    if (scheduled)
        own.schedule.follow(head, n_staged, observed, own.evictor.mask(), own.page_read.data());
    own.evictor.commit(head, staged, output_squares);
    if (scheduled) own.schedule.restore_due(head, own.page_read.data());
}

void HeadStore::add_sum(int layer, int head, int n_queries, const float* sum,
                        int workspace) noexcept {
    components_.workspaces[index(workspace)].evictor.add_sum(components_.head(layer, head),
                                                             n_queries, sum);
}

void HeadStore::commit_token(int layer, int head_index, int token, std::int32_t position,
                             const float* observed, int workspace) noexcept {
    Head& head = components_.layers[index(layer)].heads[index(head_index)];
    Workspace& own = components_.workspaces[index(workspace)];
    const StagedEntries staged{staging(layer, head_index) + token, 1, position};
    const bool is_draft = token > 0;
    if (is_draft) head.undo->begin_token(head);
    if (observed != nullptr) {
        if (is_draft) head.undo->save_importance(head);
        own.evictor.add_observed(head, staged, observed);
    }
    own.evictor.commit(head, staged, 0.0f);
    if (is_draft) head.undo->end_token();
}

void HeadStore::settle_drafts(int n_accepted) {
    if (n_accepted < 0) throw std::invalid_argument("fewer drafts than none were accepted");
    std::size_t n_undone = 0;
    components_.for_each_head([&](Head& head) {
        if (!head.undo) return;
        n_undone += head.undo->evicted_after(n_accepted);
        head.undo->roll_back(head, n_accepted, *components_.common.kernels);
        head.undo->clear();
        head.drop_empty_pages();
    });
    components_.common.evicted.fetch_sub(n_undone, std::memory_order_relaxed);
}

void HeadStore::check_files() {
    PagePool& pool = components_.share.pool().pages();
    if (!pool.any_file_changed()) return;
    components_.for_each_head([&](const Head& head) {
        for (const std::byte* page : head.pages.all())
            if (pool.is_changed(page))
                throw MappedFileError("someone has written to the file that the pages are from");
    });
}

void HeadStore::truncate(std::int32_t position) {
    if (position < 0) throw std::invalid_argument("positions begin at 0");
    std::uint8_t* mask = components_.workspaces.front().evictor.mask();
    components_.share.pool().require_room(
        [&] { return copies_to_truncate(components_, position); });
    components_.common.whole_from.store(std::min(windows_whole_from(), position),
                                        std::memory_order_relaxed);
    components_.for_each_head([&](Head& head) {
        head.mark_before(position, mask);
        head.keep(mask, {}, *components_.common.kernels);
        head.drop_empty_pages();
        if (head.frozen) head.frozen.cold->truncate(position);
        if (position > 0) return;
        if (head.dropped) head.dropped->forget();
    });
}

std::size_t HeadStore::entries() const {
    return components_.sum_over_heads([](const Head& head) { return index(head.count()); });
}

}  // namespace entropykv
