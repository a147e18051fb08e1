// Where the parts of a head's state begin: see head_states.hpp.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "decide/budget.hpp"
#include "store/store_parts.hpp"

namespace entropykv {

inline std::size_t state_pages(const PageLayout& layout, int count) {
    return static_cast<std::size_t>(pages_for(count, layout.entries));
}

// Of the entries that are attended to, of the queries' statistics, and of what was dropped, where
// that is counted.
inline std::size_t active_bytes(const StoreLayer& layer, int count) {
    const Head& head = layer.heads.front();
    return state_pages(layer.layout, count) * layer.layout.bytes + head.queries.state_bytes() +
           (head.dropped ? DroppedScores::state_bytes() : 0);
}

// Of which records they have, and how often they were detected.
inline std::size_t home_bytes(const StoreParts& parts, const StoreLayer& layer, int count) {
    if (!layer.cold) return 0;
    const bool scheduled = parts.common.settings.freezing->schedule.has_value();
    return static_cast<std::size_t>(count) * (sizeof(int) + (scheduled ? sizeof(Detections) : 0));
}

// Copies pages to where target(number) says, whole ones, but of the last one only its entries:
// nothing of what was evicted goes along.
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

}  // namespace entropykv
