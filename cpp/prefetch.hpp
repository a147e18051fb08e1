// Rows of pages that will be read soon: asked for early, since the hardware sees neither one page
// coming after another nor one row of many.
#pragma once

#include "page_layout.hpp"

namespace entropykv {

inline void ask_for(const std::byte* first, std::size_t bytes) {
    constexpr std::size_t kLine = 64;
    for (std::size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(first + i);
}

// K of all entries of a page.
inline void ask_for_keys(const PageLayout& layout, const std::byte* page) {
    const auto n_groups = PageLayout::index(layout.entries / kGroupEntries);
    ask_for(page + layout.k_offset, layout.k_group_bytes() * n_groups);
}

}  // namespace entropykv
