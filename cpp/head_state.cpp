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

#include "budget.hpp"
#include "head_store.hpp"

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

std::size_t HeadStore::state_bytes(int layer, int count) const {
    const PageLayout& layout = layers_.at(index(layer)).layout;
    return pages_of(layout, count) * layout.bytes +
           layers_.at(index(layer)).heads.front().queries.state_bytes();
}

void HeadStore::save_head(int layer_index, int head_index, std::byte* state) const {
    const Layer& layer = layers_.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    copy_pages(layer.layout, head.pages, head.count,
               [&](std::size_t page) { return state + page * layer.layout.bytes; });
    head.queries.save(state + pages_of(layer.layout, head.count) * layer.layout.bytes);
}

std::string HeadStore::state_problem(int layer_index, int count, const std::byte* state,
                                     std::size_t size, std::int32_t end) const {
    if (count < 0 || count > settings_.max_entries) return "an impossible number of entries";
    const PageLayout& layout = layers_.at(index(layer_index)).layout;
    if (size != state_bytes(layer_index, count)) return "a size that is not that of its entries";
    std::vector<bool> seen(index(std::max(end, 0)));
    for (int first = 0; first < count; first += layout.entries, state += layout.bytes) {
        const int n = std::min(layout.entries, count - first);
        if (const char* problem = entries_problem(layout, state, n, seen)) return problem;
    }
    const std::size_t of_queries = layers_[index(layer_index)].heads.front().queries.state_bytes();
    if (!QueryStatistics::is_possible(state, of_queries)) return "impossible queries";
    return {};
}

void HeadStore::begin_load(const std::vector<int>& counts) {
    std::size_t next = 0;
    for (Layer& layer : layers_)
        for (Head& head : layer.heads)
            grow_pages(layer, head, std::min(head.budget, counts.at(next++)));
    if (next != counts.size()) throw std::invalid_argument("too many counts");
}

void HeadStore::load_head(int layer_index, int head_index, int count, std::byte* state) {
    Layer& layer = layers_.at(index(layer_index));
    Head& head = layer.heads.at(index(head_index));
    head.queries.load(state + pages_of(layer.layout, count) * layer.layout.bytes);
    Head loaded{{}, count, head.budget, {}, head.queries};
    for (std::size_t page = 0; page < pages_of(layer.layout, count); ++page)
        loaded.pages.push_back(state + page * layer.layout.bytes);
    if (count > head.budget) keep_best(layer, loaded, head_index, 0, head.budget, workspaces_[0]);
    grow_pages(layer, head, loaded.count);
    head.count = loaded.count;
    copy_pages(layer.layout, loaded.pages, head.count,
               [&](std::size_t page) { return head.pages[page]; });
    drop_pages(layer, head, head.count);
}

}  // namespace entropykv
