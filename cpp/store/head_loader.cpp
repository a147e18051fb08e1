#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "cold/cold_state.hpp"
#include "store/head_state_parts.hpp"
#include "store/head_states.hpp"

namespace entropykv {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

}  // namespace

void HeadLoader::begin(const std::vector<int>& counts, const std::vector<const std::byte*>& states,
                       const std::vector<int>& budgets) {
    for (const std::vector<int>* numbers : {&counts, &budgets})
        for (const int n : *numbers) parts_.most_loaded = std::max(parts_.most_loaded, n);
    parts_.size_workspaces();
    std::size_t next = 0;
    std::size_t n_pages = 0;
    std::size_t n_freed = 0;  // once nothing is held
    for (StoreLayer& layer : parts_.layers) {
        for (Head& head : layer.heads) {
            const int count = counts.at(next);
            const int budget = budgets.at(next);
            const std::byte* state = states.at(next++);
            head.pages.reserve(std::min(budget, count));
            n_pages += head.pages.pages_of(std::min(budget, count));
            n_freed += head.pages.size() - head.pages.foreign(0, head.pages.size());
            if (head.frozen)
                ColdLoader(*head.frozen.cold)
                    .begin(state + active_bytes(layer, count) + home_bytes(parts_, layer, count),
                           std::max(0, count - budget));
        }
    }
    if (next != counts.size()) throw std::invalid_argument("too many counts");
    StorePool& pool = parts_.share.pool();
    pool.make_room([&] { return n_pages > n_freed ? n_pages - n_freed : 0; });
    pool.pages().map(pool.pages().used_pages() - parts_.share.used() + n_pages);
}

void HeadLoader::load(int layer_index, int head_index, int count, std::byte* state) {
    StoreLayer& layer = parts_.layers.at(index(layer_index));
    const PageLayout& layout = layer.layout;
    Head& head = layer.heads.at(index(head_index));
    const std::byte* of_queries = state + state_pages(layout, count) * layout.bytes;
    head.queries.load(of_queries);
    if (head.dropped) head.dropped->load(of_queries + head.queries.state_bytes());
    // A head of the state's own pages, which evicts what the budget does not hold.
    Head loaded(layer.shape, layout, parts_.share);
    loaded.begin_with(count);
    loaded.set_budget(head.budget());
    loaded.queries = head.queries;
    loaded.dropped = head.dropped;
    loaded.turns = head.turns;
    std::vector<std::byte*> pages;
    for (std::size_t page = 0; page < state_pages(layout, count); ++page)
        pages.push_back(state + page * layout.bytes);
    loaded.pages.look_at(std::move(pages));
    if (head.frozen) load_frozen(layer, head, state, loaded);
    if (count > head.budget()) parts_.workspaces.front().keeper.keep_best(loaded);
    head.pages.drop(0);  // others may own them, too
    head.pages.grow(loaded.count());
    head.begin_with(loaded.count());
    copy_pages(layout, loaded.pages.all(), head.count(),
               [&](std::size_t page) { return head.pages[static_cast<int>(page)]; });
    head.drop_empty_pages();
    head.dropped = loaded.dropped;
    head.frozen.cold = std::move(loaded.frozen.cold);
    head.frozen.homes = std::move(loaded.frozen.homes);
    head.frozen.detections = std::move(loaded.frozen.detections);
    head.size_frozen();
}

// The frozen entries of a state, and which of the head's own have a record.
void HeadLoader::load_frozen(const StoreLayer& layer, Head& head, const std::byte* state,
                             Head& loaded) {
    const auto n = index(loaded.count());
    const std::byte* homes = state + active_bytes(layer, loaded.count());
    const int n_dropped =
        ColdLoader(*head.frozen.cold)
            .load(homes + home_bytes(parts_, layer, loaded.count()), parts_.common.importance(),
                  *parts_.common.kernels, parts_.workspaces.front().page_read.data());
    parts_.common.evicted.fetch_add(index(n_dropped), std::memory_order_relaxed);
    FrozenEntries& frozen = loaded.frozen;
    frozen.counts_detections = head.frozen.counts_detections;
    frozen.homes.resize(n);
    if (frozen.counts_detections) frozen.detections.resize(n);
    frozen.cold = std::move(head.frozen.cold);
    if (n > 0) std::memcpy(frozen.homes.data(), homes, n * sizeof(int));
    for (int& home : frozen.homes)
        if (home != ColdHead::kNone && frozen.cold->position(home) == kDead) home = ColdHead::kNone;
    if (frozen.counts_detections && n > 0)
        std::memcpy(frozen.detections.data(), homes + n * sizeof(int), n * sizeof(Detections));
}

}  // namespace entropykv
