#include "store/staging.hpp"

#include <algorithm>

#include "decide/budget.hpp"

namespace entropykv {

std::size_t Staging::pages_of(int n_tokens) const {
    return static_cast<std::size_t>(pages_for(n_tokens, least_entries_));
}

// The layer that is being attended to and the next one take turns with two sets of rows, and every
// layer with several readers has its own. The two sets have separate first pages, because single
// tokens of two layers are staged at a time, and share the other pages.
Staging::Staging(const std::vector<LayerShape>& layers, const std::vector<PageLayout>& layouts,
                 std::size_t page_bytes, int max_tokens, int n_sequences, int n_drafts,
                 bool all_layers)
    : least_entries_(layouts.front().entries),
      n_drafts_(n_drafts),
      single_pages_(static_cast<std::size_t>(n_sequences)) {
    for (const PageLayout& layout : layouts)
        least_entries_ = std::min(least_entries_, layout.entries);
    // Every token of a run with drafts has a page of its own.
    row_pages_ = pages_of(max_tokens) + single_pages_ - 1 +
                 single_pages_ * static_cast<std::size_t>(n_drafts);
    const auto has_own = [&](const LayerShape& shape) { return all_layers || shape.readers > 1; };
    std::size_t most_heads = 0;
    for (const LayerShape& shape : layers)
        if (!has_own(shape))
            most_heads = std::max(most_heads, static_cast<std::size_t>(shape.n_head_kv));
    std::size_t n_rows = 2 * most_heads;
    for (std::size_t i = 0; i < layers.size(); ++i) {
        first_row_.push_back(has_own(layers[i]) ? n_rows : i % 2 * most_heads);
        if (has_own(layers[i])) n_rows += static_cast<std::size_t>(layers[i].n_head_kv);
    }
    const std::size_t n_shared = most_heads * (row_pages_ - single_pages_);
    memory_ = AlignedBytes((n_rows * row_pages_ - n_shared) * page_bytes);
    std::byte* next = memory_.data();
    for (std::size_t row = 0; row < n_rows; ++row) {
        for (std::size_t page = 0; page < row_pages_; ++page) {
            const bool shared = row >= most_heads && row < 2 * most_heads && page >= single_pages_;
            pages_.push_back(shared ? pages_[(row - most_heads) * row_pages_ + page] : next);
            if (!shared) next += page_bytes;
        }
    }
}

}  // namespace entropykv
