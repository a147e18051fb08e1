// The staging area: pages that hold the micro-batch of one layer while it is attended to, laid out
// like the pool's pages.
#pragma once

#include <cstddef>
#include <vector>

#include "platform/aligned_bytes.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

class Staging {
public:
    // Makes room for a micro-batch with max_tokens tokens of one sequence and single tokens of the
    // others, each of them followed by up to n_drafts drafts. page_bytes: that of page_layouts().
    // all_layers: all of them are staged at a time.
    Staging(const std::vector<LayerShape>& layers, const std::vector<PageLayout>& layouts,
            std::size_t page_bytes, int max_tokens, int n_sequences, int n_drafts,
            bool all_layers = false);

    // Returns the pages of a KV head. Each sequence uses some of them, starting with a page of its
    // own.
    std::byte* const* row(std::size_t layer, int head) const {
        return pages_.data() + (first_row_[layer] + static_cast<std::size_t>(head)) * row_pages_;
    }
    std::size_t row_pages() const { return row_pages_; }
    // Returns how many pages of a row n_tokens tokens of a sequence take.
    std::size_t pages_of(int n_tokens) const;
    // Returns how many drafts of a sequence there is room for beside those of all others.
    int n_drafts() const { return n_drafts_; }
    // Returns how many pages at the start of a row keep single tokens until the next layer is done.
    std::size_t single_pages() const { return single_pages_; }

    std::size_t bytes() const { return memory_.size(); }

private:
    int least_entries_;  // fewest entries that a page has in any layer
    int n_drafts_;
    std::size_t single_pages_;
    std::size_t row_pages_;
    std::vector<std::size_t> first_row_;  // has one value for each layer
    std::vector<std::byte*> pages_;
    AlignedBytes memory_;
};

}  // namespace entropykv
