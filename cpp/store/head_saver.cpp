#include <algorithm>
#include <cmath>
#include <cstring>

#include "cold/cold_state.hpp"
#include "store/head_state_parts.hpp"
#include "store/head_states.hpp"

namespace entropykv {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

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

// Entries, statistics, and what was dropped; importance(i): of an entry, which is not in pages that
// others own, too.
template <typename Importance>
void save_active(const PageLayout& layout, const std::vector<std::byte*>& pages, int count,
                 const QueryStatistics& queries, const std::optional<DroppedScores>& dropped,
                 Importance importance, std::byte* state) {
    copy_pages(layout, pages, count, [&](std::size_t page) { return state + page * layout.bytes; });
    for (int i = 0; i < count; ++i) {
        std::byte* page = state + index(layout.page_of(i)) * layout.bytes;
        layout.importance(page)[layout.slot_of(i)] = importance(i);
    }
    std::byte* of_queries = state + state_pages(layout, count) * layout.bytes;
    queries.save(of_queries);
    if (dropped) dropped->save(of_queries + queries.state_bytes());
}

// Of a head whose frozen entries were given up: none of its entries has a record.
void save_nothing_frozen(std::byte* homes, std::size_t bytes, int count) {
    std::fill_n(homes, bytes, std::byte{0});
    for (int i = 0; i < count; ++i)
        std::memcpy(homes + index(i) * sizeof(int), &ColdHead::kNone, sizeof(int));
    ColdSaver::save_empty(homes + bytes);
}

}  // namespace

std::size_t HeadSaver::bytes(int layer_index, int head_index) const {
    const StoreLayer& layer = parts_.layers.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    return active_bytes(layer, head.count()) + home_bytes(parts_, layer, head.count()) +
           (head.frozen  ? ColdSaver(*head.frozen.cold).bytes()
            : layer.cold ? ColdSaver::empty_bytes()
                         : 0);
}

void HeadSaver::save(int layer_index, int head_index, std::byte* state) const {
    const StoreLayer& layer = parts_.layers.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    const int count = head.count();
    save_active(
        layer.layout, head.pages.all(), count, head.queries, head.dropped,
        [&](int i) { return head.importance(i); }, state);
    if (!layer.cold) return;
    std::byte* homes = state + active_bytes(layer, count);
    const std::size_t bytes = home_bytes(parts_, layer, count);
    if (!head.frozen) return save_nothing_frozen(homes, bytes, count);
    const std::size_t of_homes = index(count) * sizeof(int);
    if (count > 0) std::memcpy(homes, head.frozen.homes.data(), of_homes);
    if (head.frozen.counts_detections && count > 0)
        std::memcpy(homes + of_homes, head.frozen.detections.data(),
                    index(count) * sizeof(Detections));
    if (!ColdSaver(*head.frozen.cold).save(homes + bytes))
        throw ColdStorageError(parts_.storage->failed());
}

std::size_t HeadSaver::bytes(int layer, const CheckpointHead& head) const {
    return active_bytes(parts_.layers.at(index(layer)), head.count);
}

void HeadSaver::save(int layer, const CheckpointHead& head, std::byte* state) const {
    save_active(
        parts_.layers.at(index(layer)).layout, head.pages, head.count, head.queries, head.dropped,
        [&](int i) { return head.importance[index(i)]; }, state);
}

std::string HeadSaver::problem(int layer_index, int count, const std::byte* state, std::size_t size,
                               std::int32_t end) const {
    constexpr const char* kSize = "a size that is not that of its entries";
    if (count < 0 || count > parts_.common.settings.max_entries)
        return "an impossible number of entries";
    const StoreLayer& layer = parts_.layers.at(index(layer_index));
    const PageLayout& layout = layer.layout;
    const std::size_t active = active_bytes(layer, count);
    const std::size_t warm = active + home_bytes(parts_, layer, count);
    if (layer.cold ? size < warm : size != warm) return kSize;
    std::vector<bool> seen(index(std::max(end, 0)));
    const std::byte* page = state;
    for (int first = 0; first < count; first += layout.entries, page += layout.bytes) {
        const int n = std::min(layout.entries, count - first);
        if (const char* problem = entries_problem(layout, page, n, seen)) return problem;
    }
    const std::size_t of_queries = layer.heads.front().queries.state_bytes();
    if (!QueryStatistics::is_possible(page, of_queries)) return "impossible queries";
    if (layer.heads.front().dropped && !DroppedScores::is_possible(page + of_queries))
        return "impossible scores of what was dropped";
    if (!layer.cold) return {};
    if (!layer.heads.front().frozen) return "nothing to freeze into any more";
    const std::string problem =
        ColdSaver(*layer.heads.front().frozen.cold).problem(state + warm, size - warm, seen);
    return problem.empty() ? problem_of_homes(layer, count, state) : problem;
}

// Every home is a record of the same position that is not frozen.
std::string HeadSaver::problem_of_homes(const StoreLayer& layer, int count,
                                        const std::byte* state) const {
    const std::byte* homes = state + active_bytes(layer, count);
    const std::byte* cold = homes + home_bytes(parts_, layer, count);
    for (int i = 0; i < count; ++i) {
        int home = 0;
        std::memcpy(&home, homes + index(i) * sizeof home, sizeof home);
        if (home == ColdHead::kNone) continue;
        const std::byte* page = state + index(i / layer.layout.entries) * layer.layout.bytes;
        if (!ColdSaver::is_home(cold, home, layer.layout.entries,
                                layer.layout.positions(page)[i % layer.layout.entries]))
            return "an entry whose frozen copy is another's";
    }
    return {};
}

}  // namespace entropykv
