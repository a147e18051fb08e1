#include "store/head_states.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "cold/cold_state.hpp"
#include "decide/budget.hpp"

namespace entropykv {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

std::size_t state_pages(const PageLayout& layout, int count) {
    return static_cast<std::size_t>(pages_for(count, layout.entries));
}

// Returns the bytes of the held entries and the dropped scores (if they are counted).
std::size_t active_bytes(const StoreLayer& layer, int count) {
    const Head& head = layer.heads.front();
    return state_pages(layer.layout, count) * layer.layout.bytes +
           (head.dropped ? DroppedScores::state_bytes() : 0);
}

// Returns how many pages the bytes of active_bytes() take.
std::size_t whole_pages(const StoreLayer& layer, int count) {
    return (active_bytes(layer, count) + layer.layout.bytes - 1) / layer.layout.bytes;
}

// Returns the bytes that say which entries have records, and how often they were detected.
std::size_t record_number_bytes(const StoreComponents& components, const StoreLayer& layer,
                                int count) {
    if (!layer.cold) return 0;
    const bool scheduled = components.common.settings.freezing->schedule.has_value();
    return static_cast<std::size_t>(count) * (sizeof(int) + (scheduled ? sizeof(Detections) : 0));
}

// Copies pages to where target(number) says. Full pages are copied whole; of the last page only the
// entries are, so that no evicted text gets into the state.
template <typename Target>
void copy_pages(const PageLayout& layout, const std::vector<std::byte*>& from, int count,
                Target target) {
    for (std::size_t page = 0; page < state_pages(layout, count); ++page) {
        const int n = count - static_cast<int>(page) * layout.entries;
        if (n >= layout.entries) {
            std::memcpy(target(page), from[page], layout.bytes);
            continue;
        }
        std::memset(target(page), 0, layout.bytes);
        for (int i = 0; i < n; ++i) copy_entry(layout, from[page], i, target(page), i);
    }
}

// Saves the held entries and the dropped scores. importance(i) returns an entry's importance,
// because shared pages do not hold it.
template <typename Importance>
void save_active(const PageLayout& layout, const std::vector<std::byte*>& pages, int count,
                 const std::optional<DroppedScores>& dropped, Importance importance,
                 std::byte* state) {
    copy_pages(layout, pages, count, [&](std::size_t page) { return state + page * layout.bytes; });
    for (int i = 0; i < count; ++i) {
        std::byte* page = state + index(layout.page_of(i)) * layout.bytes;
        layout.importance(page)[layout.slot_of(i)] = importance(i);
    }
    if (dropped) dropped->save(state + state_pages(layout, count) * layout.bytes);
}

// Saves that no entry has a record, for a head whose frozen entries were given up.
void save_nothing_frozen(std::byte* record_numbers, std::size_t bytes, int count) {
    std::fill_n(record_numbers, bytes, std::byte{0});
    for (int i = 0; i < count; ++i)
        std::memcpy(record_numbers + index(i) * sizeof(int), &ColdHead::kNone, sizeof(int));
    ColdSaver::save_empty(record_numbers + bytes);
}

}  // namespace

std::size_t HeadSaver::bytes(int layer_index, int head_index) const {
    const StoreLayer& layer = components_.layers.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    return active_bytes(layer, head.count()) +
           record_number_bytes(components_, layer, head.count()) +
           (head.frozen  ? ColdSaver(*head.frozen.cold).bytes()
            : layer.cold ? ColdSaver::empty_bytes()
                         : 0);
}

void HeadSaver::save(int layer_index, int head_index, std::byte* state) const {
    const StoreLayer& layer = components_.layers.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    const int count = head.count();
    save_active(
        layer.layout, head.pages.all(), count, head.dropped,
        [&](int i) { return head.importance(i); }, state);
    if (!layer.cold) return;
    std::byte* record_numbers = state + active_bytes(layer, count);
    const std::size_t bytes = record_number_bytes(components_, layer, count);
    if (!head.frozen) return save_nothing_frozen(record_numbers, bytes, count);
    const std::size_t of_record_numbers = index(count) * sizeof(int);
    if (count > 0)
        std::memcpy(record_numbers, head.frozen.record_numbers.data(), of_record_numbers);
    if (head.frozen.counts_detections && count > 0)
        std::memcpy(record_numbers + of_record_numbers, head.frozen.detections.data(),
                    index(count) * sizeof(Detections));
    if (!ColdSaver(*head.frozen.cold).save(record_numbers + bytes))
        throw ColdStorageError(components_.storage->failed());
}

std::size_t HeadSaver::padding(int layer, int head) const {
    const StoreLayer& of = components_.layers.at(index(layer));
    return padding_of(of, of.heads.at(index(head)).count());
}

std::size_t HeadSaver::padding_of(const StoreLayer& layer, int count) const {
    for (const StoreLayer& each : components_.layers)
        if (each.layout.bytes != components_.share.page_bytes()) return 0;
    if (layer.cold) return 0;
    return whole_pages(layer, count) * layer.layout.bytes - active_bytes(layer, count);
}

std::size_t HeadSaver::bytes(int layer, const CheckpointHead& head) const {
    return active_bytes(components_.layers.at(index(layer)), head.count);
}

void HeadSaver::save(int layer, const CheckpointHead& head, std::byte* state) const {
    save_active(
        components_.layers.at(index(layer)).layout, head.pages, head.count, head.dropped,
        [&](int i) { return head.importance[index(i)]; }, state);
}

const char* entries_problem(const PageLayout& layout, const std::byte* state, int count,
                            std::vector<bool>& seen) {
    for (int i = 0; i < count; ++i) {
        const std::byte* page = state + index(layout.page_of(i)) * layout.bytes;
        const int slot = layout.slot_of(i);
        // The states of small files lie at any address.
        std::int32_t stored;
        float importance;
        std::memcpy(&stored, page + layout.position_offset + index(slot) * sizeof stored,
                    sizeof stored);
        std::memcpy(&importance, page + layout.importance_offset + index(slot) * sizeof importance,
                    sizeof importance);
        const auto position = static_cast<std::size_t>(stored);
        // This also catches negative positions.
        if (position >= seen.size()) return "a position that was never read";
        if (seen[position]) return "a position twice";
        seen[position] = true;
        if (!std::isfinite(importance) || importance < 0.0f) return "an impossible importance";
    }
    return nullptr;
}

std::string HeadSaver::problem(int layer_index, int count, const std::byte* state, std::size_t size,
                               std::int32_t end) const {
    constexpr const char* kSize = "a size that is not that of its entries";
    if (count < 0 || count > components_.common.settings.max_entries)
        return "an impossible number of entries";
    const StoreLayer& layer = components_.layers.at(index(layer_index));
    const PageLayout& layout = layer.layout;
    const std::size_t active = active_bytes(layer, count);
    const std::size_t warm = active + record_number_bytes(components_, layer, count);
    const bool is_whole = size == warm || size == warm + padding_of(layer, count);
    if (layer.cold ? size < warm : !is_whole) return kSize;
    std::vector<bool> seen(index(std::max(end, 0)));
    if (const char* problem = entries_problem(layout, state, count, seen)) return problem;
    const std::byte* dropped = state + state_pages(layout, count) * layout.bytes;
    if (layer.heads.front().dropped && !DroppedScores::is_possible(dropped))
        return "impossible scores of what was dropped";
    if (!layer.cold) return {};
    if (!layer.heads.front().frozen) return "nothing to freeze into any more";
    const std::string problem =
        ColdSaver(*layer.heads.front().frozen.cold).problem(state + warm, size - warm, seen);
    return problem.empty() ? problem_of_record_numbers(layer, count, state) : problem;
}

// Checks that every record number of a held entry belongs to a record of the same position that is
// not frozen.
std::string HeadSaver::problem_of_record_numbers(const StoreLayer& layer, int count,
                                                 const std::byte* state) const {
    const std::byte* record_numbers = state + active_bytes(layer, count);
    const std::byte* cold = record_numbers + record_number_bytes(components_, layer, count);
    for (int i = 0; i < count; ++i) {
        int record_number = 0;
        std::memcpy(&record_number, record_numbers + index(i) * sizeof record_number,
                    sizeof record_number);
        if (record_number == ColdHead::kNone) continue;
        const std::byte* page = state + index(i / layer.layout.entries) * layer.layout.bytes;
        if (!ColdSaver::is_restored_record(cold, record_number, layer.layout.entries,
                                           layer.layout.positions(page)[i % layer.layout.entries]))
            return "an entry whose frozen copy is another's";
    }
    return {};
}

void HeadLoader::begin(const std::vector<int>& counts, const std::vector<const std::byte*>& states,
                       const std::vector<int>& budgets) {
    for (const std::vector<int>* numbers : {&counts, &budgets})
        for (const int n : *numbers) components_.most_loaded = std::max(components_.most_loaded, n);
    components_.size_workspaces();
    std::size_t next = 0;
    std::size_t n_pages = 0;
    std::size_t n_freed = 0;  // pages that become free, because the old entries go
    for (StoreLayer& layer : components_.layers) {
        for (Head& head : layer.heads) {
            const int count = counts.at(next);
            const int budget = budgets.at(next);
            const std::byte* state = states.at(next++);
            head.pages.reserve(std::min(budget, count));
            n_pages += head.pages.pages_of(std::min(budget, count));
            n_freed += head.pages.size() - head.pages.count_shared(0, head.pages.size());
            if (head.frozen)
                ColdLoader(*head.frozen.cold)
                    .begin(state + active_bytes(layer, count) +
                               record_number_bytes(components_, layer, count),
                           std::max(0, count - budget));
        }
    }
    if (next != counts.size()) throw std::invalid_argument("too many counts");
    StorePool& pool = components_.share.pool();
    pool.make_room([&] { return n_pages > n_freed ? n_pages - n_freed : 0; });
    pool.pages().map(pool.pages().used_pages() - components_.share.used() + n_pages);
}

void HeadLoader::load(int layer_index, int head_index, int count, std::byte* state) {
    StoreLayer& layer = components_.layers.at(index(layer_index));
    Head& head = layer.heads.at(index(head_index));
    const PageLayout& layout = head.layout();
    if (head.dropped) head.dropped->load(state + state_pages(layout, count) * layout.bytes);
    // A temporary head owns the pages of the state, and evicts what the budget does not hold.
    Head loaded(layer.shape, layout, components_.share);
    loaded.begin_with(count);
    loaded.set_budget(head.budget());
    loaded.dropped = head.dropped;
    std::vector<std::byte*> pages;
    for (std::size_t page = 0; page < state_pages(layout, count); ++page)
        pages.push_back(state + page * layout.bytes);
    loaded.pages.view(std::move(pages));
    if (head.frozen) load_frozen(layer, head, state, loaded);
    if (count > head.budget()) components_.workspaces.front().evictor.evict_to_budget(loaded);
    head.pages.drop(0);  // the old pages may have other owners, so they are not overwritten
    head.pages.grow(loaded.count());
    head.begin_with(loaded.count());
    copy_pages(layout, loaded.pages.all(), head.count(),
               [&](std::size_t page) { return head.pages[static_cast<int>(page)]; });
    head.drop_empty_pages();
    head.dropped = loaded.dropped;
    head.frozen.cold = std::move(loaded.frozen.cold);
    head.frozen.record_numbers = std::move(loaded.frozen.record_numbers);
    head.frozen.detections = std::move(loaded.frozen.detections);
    head.size_frozen();
}

// Tells whether a file begins with all states, each of them whole pages of the pool, and whether no
// head has to evict.
bool HeadLoader::are_pages(MappedFile& file, const std::vector<int>& counts,
                           const std::vector<const std::byte*>& states) const {
    if (!file.starts_at_page()) return false;
    const std::byte* next = file.data();
    std::size_t number = 0;
    for (const StoreLayer& layer : components_.layers) {
        for (const Head& head : layer.heads) {
            const int count = counts.at(number);
            if (layer.cold || layer.layout.bytes != components_.share.page_bytes() ||
                count > head.budget() || states.at(number++) != next)
                return false;
            next += whole_pages(layer, count) * layer.layout.bytes;
        }
    }
    return next <= file.data() + file.size();
}

bool HeadLoader::adopt(const std::shared_ptr<MappedFile>& file, const std::vector<int>& counts,
                       const std::vector<const std::byte*>& states) {
    if (!are_pages(*file, counts, states)) return false;
    std::vector<std::vector<std::byte*>> pages;
    std::vector<std::vector<float>> importance;
    std::vector<std::size_t> unused;  // pages that hold no entries
    std::size_t n_pages = 0;
    std::size_t number = 0;
    for (StoreLayer& layer : components_.layers) {
        const PageLayout& layout = layer.layout;
        for (Head& head : layer.heads) {
            const int count = counts[number++];
            const std::size_t end = n_pages + whole_pages(layer, count);
            auto& of_head = pages.emplace_back();
            auto& values = importance.emplace_back();
            for (; of_head.size() < state_pages(layout, count); ++n_pages) {
                std::byte* page = of_head.emplace_back(file->data() + n_pages * layout.bytes);
                const float* first = layout.importance(page);
                values.insert(values.end(), first, first + layout.entries);
            }
            for (; n_pages < end; ++n_pages) unused.push_back(n_pages);
            head.pages.make_room_to_share(of_head.size());
        }
    }
    if (components_.share.adopt(file, n_pages, unused) == nullptr) return false;
    number = 0;
    for (StoreLayer& layer : components_.layers) {
        for (Head& head : layer.heads) {
            const std::size_t of_pages = pages[number].size() * layer.layout.bytes;
            std::byte* rest = file->data() + (states[number] - file->data()) + of_pages;
            if (head.dropped) head.dropped->load(rest);
            // Free pages hold zeros where entries have none, so that saved states do, too.
            std::memset(rest, 0, active_bytes(layer, counts[number]) - of_pages);
            head.pages.take_over(std::move(pages[number]), std::move(importance[number]));
            head.begin_with(counts[number++]);
        }
    }
    return true;
}

void HeadLoader::load_frozen(const StoreLayer& layer, Head& head, const std::byte* state,
                             Head& loaded) {
    const auto n = index(loaded.count());
    const std::byte* record_numbers = state + active_bytes(layer, loaded.count());
    const int n_dropped =
        ColdLoader(*head.frozen.cold)
            .load(record_numbers + record_number_bytes(components_, layer, loaded.count()),
                  components_.common.importance(), *components_.common.kernels,
                  components_.workspaces.front().page_read.data());
    components_.common.evicted.fetch_add(index(n_dropped), std::memory_order_relaxed);
    FrozenEntries& frozen = loaded.frozen;
    frozen.counts_detections = head.frozen.counts_detections;
    frozen.record_numbers.resize(n);
    if (frozen.counts_detections) frozen.detections.resize(n);
    frozen.cold = std::move(head.frozen.cold);
    if (n > 0) std::memcpy(frozen.record_numbers.data(), record_numbers, n * sizeof(int));
    for (int& record_number : frozen.record_numbers)
        if (record_number != ColdHead::kNone && frozen.cold->position(record_number) == kDead)
            record_number = ColdHead::kNone;
    if (frozen.counts_detections && n > 0)
        std::memcpy(frozen.detections.data(), record_numbers + n * sizeof(int),
                    n * sizeof(Detections));
}

}  // namespace entropykv
