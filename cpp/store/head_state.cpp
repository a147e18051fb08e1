// The entries of a head as bytes, for session files: whole pages in the order of the page table.
//
// A state of `count` entries is pages_for(count, layout.entries) pages of layout.bytes bytes each,
// laid out as page_layout.hpp says. Entries keep their slots, so that sums over them keep their
// order; unused slots of the last page are zero. Where scores need them, the statistics of the
// queries come last (query_statistics.hpp). The layout depends on the type and the shapes of
// the layers alone, never on the instruction set. Numbers are little-endian. Whoever changes the
// layout of a page changes the version of the session files with it (session_file.py).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "decide/budget.hpp"
#include "store/head_store.hpp"

namespace entropykv {
namespace {

std::size_t pages_of(const PageLayout& layout, int count) {
    return static_cast<std::size_t>(pages_for(count, layout.entries));
}

// What is wrong with the positions and importances of a page's first n entries; seen: by position.
const char* entries_problem(const PageLayout& layout, const std::byte* page, int n,
                            std::vector<bool>& seen) {
    for (int i = 0; i < n; ++i) {
        const auto position = static_cast<std::size_t>(layout.positions(page)[i]);
        if (position >= seen.size()) return "a position that was never read";  // or negative
        if (seen[position]) return "a position twice";
        seen[position] = true;
        const float importance = layout.importance(page)[i];
        if (!std::isfinite(importance) || importance < 0.0f) return "an impossible importance";
    }
    return nullptr;
}

// Whole pages, but for the last one only its entries: nothing of what was evicted goes along.
template <typename Target>
void copy_pages(const PageLayout& layout, const std::vector<std::byte*>& from, int count,
                Target target) {
    for (std::size_t page = 0; page < pages_of(layout, count); ++page) {
        const int n = count - static_cast<int>(page) * layout.entries;
        if (n >= layout.entries) {
            std::memcpy(target(page), from[page], layout.bytes);
            continue;
        }
        std::memset(target(page), 0, layout.bytes);
        for (int i = 0; i < n; ++i) copy_entry(layout, from[page], i, target(page), i);
    }
}

}  // namespace

// Of the entries that are attended to, and of the queries' statistics.
std::size_t HeadStore::active_state_bytes(const Layer& layer, int count) const {
    return pages_of(layer.layout, count) * layer.layout.bytes +
           layer.heads.front().queries.state_bytes();
}

std::size_t HeadStore::home_state_bytes(const Layer& layer, int count) const {
    if (!layer.cold) return 0;
    return index(count) * (sizeof(int) + (settings_.freezing->schedule ? sizeof(Detections) : 0));
}

std::size_t HeadStore::state_bytes(int layer_index, int head_index) const {
    const Layer& layer = layers_.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    return active_state_bytes(layer, head.count) + home_state_bytes(layer, head.count) +
           (head.cold    ? head.cold->state_bytes()
            : layer.cold ? ColdHead::empty_state_bytes()
                         : 0);
}

void HeadStore::save_head(int layer_index, int head_index, std::byte* state) const {
    const Layer& layer = layers_.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    save_active(layer, head, state);
    if (!layer.cold) return;
    state += active_state_bytes(layer, head.count);
    if (!head.cold) {  // given up: none of its entries has a record
        std::fill_n(state, home_state_bytes(layer, head.count), std::byte{0});
        for (int i = 0; i < head.count; ++i)
            std::memcpy(state + index(i) * sizeof(int), &ColdHead::kNone, sizeof(int));
        ColdHead::save_empty(state + home_state_bytes(layer, head.count));
        return;
    }
    const std::size_t of_homes = index(head.count) * sizeof(int);
    if (head.count > 0) std::memcpy(state, head.homes.data(), of_homes);
    if (schedule_ && head.count > 0)
        std::memcpy(state + of_homes, head.detections.data(),
                    index(head.count) * sizeof(Detections));
    if (!head.cold->save(state + home_state_bytes(layer, head.count)))
        throw ColdStorageError(cold_->failed());
}

// Entries and statistics; the importance of entries in pages that others own, too, is the head's.
void HeadStore::save_active(const Layer& layer, const Head& head, std::byte* state) const {
    copy_pages(layer.layout, head.pages, head.count,
               [&](std::size_t page) { return state + page * layer.layout.bytes; });
    for (int i = 0; head.n_shared > 0 && i < head.count; ++i) {
        std::byte* page = state + index(layer.layout.page_of(i)) * layer.layout.bytes;
        layer.layout.importance(page)[layer.layout.slot_of(i)] = stored_importance(layer, head, i);
    }
    head.queries.save(state + pages_of(layer.layout, head.count) * layer.layout.bytes);
}

std::size_t HeadStore::state_bytes(const Checkpoint& from, int layer_index, int head_index) const {
    const Layer& layer = layers_.at(index(layer_index));
    return active_state_bytes(layer, count(from, layer_index, head_index));
}

void HeadStore::save_head(const Checkpoint& from, int layer_index, int head_index,
                          std::byte* state) const {
    const Head head = head_of(checked_head(from, number_of(layer_index, head_index)));
    save_active(layers_.at(index(layer_index)), head, state);
}

std::string HeadStore::state_problem(int layer_index, int count, const std::byte* state,
                                     std::size_t size, std::int32_t end) const {
    constexpr const char* kSize = "a size that is not that of its entries";
    if (count < 0 || count > settings_.max_entries) return "an impossible number of entries";
    const Layer& layer = layers_.at(index(layer_index));
    const PageLayout& layout = layer.layout;
    const std::size_t active = active_state_bytes(layer, count);
    const std::size_t warm = active + home_state_bytes(layer, count);
    if (layer.cold ? size < warm : size != warm) return kSize;
    std::vector<bool> seen(index(std::max(end, 0)));
    const std::byte* page = state;
    for (int first = 0; first < count; first += layout.entries, page += layout.bytes) {
        const int n = std::min(layout.entries, count - first);
        if (const char* problem = entries_problem(layout, page, n, seen)) return problem;
    }
    if (!QueryStatistics::is_possible(page, active - index(static_cast<int>(page - state))))
        return "impossible queries";
    if (!layer.cold) return {};
    if (!layer.heads.front().cold) return "nothing to freeze into any more";
    const std::string problem =
        layer.heads.front().cold->state_problem(state + warm, size - warm, seen);
    return problem.empty() ? homes_problem(layer, count, state) : problem;
}

// Every home is a record of the same position that is not frozen.
std::string HeadStore::homes_problem(const Layer& layer, int count, const std::byte* state) const {
    const std::byte* homes = state + active_state_bytes(layer, count);
    const std::byte* cold = homes + home_state_bytes(layer, count);
    for (int i = 0; i < count; ++i) {
        int home = 0;
        std::memcpy(&home, homes + index(i) * sizeof home, sizeof home);
        if (home == ColdHead::kNone) continue;
        const std::byte* page = state + index(i / layer.layout.entries) * layer.layout.bytes;
        if (!ColdHead::is_home(cold, home, layer.layout.entries,
                               layer.layout.positions(page)[i % layer.layout.entries]))
            return "an entry whose frozen copy is another's";
    }
    return {};
}

void HeadStore::begin_load(const std::vector<int>& counts,
                           const std::vector<const std::byte*>& states,
                           const std::vector<int>& budgets) {
    for (const std::vector<int>* numbers : {&counts, &budgets})
        for (const int n : *numbers) most_loaded_ = std::max(most_loaded_, n);
    size_workspaces();
    std::size_t next = 0;
    std::size_t n_pages = 0;
    std::size_t n_freed = 0;  // once nothing is held
    for (Layer& layer : layers_) {
        for (Head& head : layer.heads) {
            const int count = counts.at(next);
            const int budget = budgets.at(next);
            const std::byte* state = states.at(next++);
            head.pages.reserve(pages_of(layer.layout, std::min(budget, count)));
            n_pages += pages_of(layer.layout, std::min(budget, count));
            n_freed += head.pages.size() - foreign_pages(head, 0, head.pages.size());
            if (head.cold)
                head.cold->begin_load(
                    state + active_state_bytes(layer, count) + home_state_bytes(layer, count),
                    std::max(0, count - budget));
        }
    }
    if (next != counts.size()) throw std::invalid_argument("too many counts");
    pool_->make_room([&] { return n_pages > n_freed ? n_pages - n_freed : 0; });
    pool_->pages().map(pool_->pages().used_pages() - used_pages_ + n_pages);
}

void HeadStore::load_head(int layer_index, int head_index, int count, std::byte* state) {
    Layer& layer = layers_.at(index(layer_index));
    Head& head = layer.heads.at(index(head_index));
    head.queries.load(state + pages_of(layer.layout, count) * layer.layout.bytes);
    Head loaded;
    loaded.count = count;
    loaded.budget = head.budget;
    loaded.queries = head.queries;
    for (std::size_t page = 0; page < pages_of(layer.layout, count); ++page)
        loaded.pages.push_back(state + page * layer.layout.bytes);
    if (head.cold) load_cold(layer, head, state, loaded);
    if (count > head.budget) keep_best(layer, loaded, head_index, 0, head.budget, workspaces_[0]);
    drop_pages(layer, head, 0);  // others may own them, too
    grow_pages(layer, head, loaded.count);
    head.count = loaded.count;
    copy_pages(layer.layout, loaded.pages, head.count,
               [&](std::size_t page) { return head.pages[page]; });
    drop_pages(layer, head, head.count);
    head.cold = std::move(loaded.cold);
    head.homes = std::move(loaded.homes);
    head.detections = std::move(loaded.detections);
    size_homes(layer, head);
}

// The frozen entries of a state, and which of the head's own have a record.
void HeadStore::load_cold(const Layer& layer, Head& head, const std::byte* state, Head& loaded) {
    const std::size_t n = index(loaded.count);
    const std::byte* homes = state + active_state_bytes(layer, loaded.count);
    const int n_dropped = head.cold->load(homes + home_state_bytes(layer, loaded.count), *kernels_,
                                          workspaces_[0].page_read.data());
    evicted_.fetch_add(index(n_dropped), std::memory_order_relaxed);
    loaded.cold = std::move(head.cold);
    loaded.homes.resize(n);
    if (n > 0) std::memcpy(loaded.homes.data(), homes, n * sizeof(int));
    for (int& home : loaded.homes)
        if (home != ColdHead::kNone && loaded.cold->position(home) == kDead) home = ColdHead::kNone;
    if (!schedule_) return;
    loaded.detections.resize(n);
    if (n > 0)
        std::memcpy(loaded.detections.data(), homes + n * sizeof(int), n * sizeof(Detections));
}

}  // namespace entropykv
