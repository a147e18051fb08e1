// Rows of pages that will be read soon: asked for early, since the hardware sees neither one page
// coming after another nor one row of many.
#pragma once

#include "page_layout.hpp"

namespace entropykv {

inline void ask_for(const std::byte* first, std::size_t bytes) {
    constexpr std::size_t kLine = 64;
    for (std::size_t i = 0; i < bytes; i += kLine)
        __builtin_prefetch(first + i);
}

// K of all entries of a page.
inline void ask_for_keys(const PageLayout& layout, const std::byte* page) {
    const auto n_groups = PageLayout::index(layout.entries / kGroupEntries);
    ask_for(page + layout.k_offset, layout.k_group_bytes() * n_groups);
}

// V of one entry.
inline void ask_for_value(const PageLayout& layout, const std::byte* page, int slot) {
    if (layout.latent) return;
    const std::size_t first = layout.v_index(slot, 0);
    const std::size_t end = layout.v_index(slot, layout.v_stride - 1) + 1;
    ask_for(page + layout.v_offset + first * layout.value_bytes(),
                   (end - first) * layout.value_bytes());
}

}  // namespace entropykv
