// The staging area: pages that hold one micro-batch of one layer while it is attended to, laid out
// as those of the pool.
#pragma once

#include <cstddef>
#include <vector>

#include "platform/aligned_bytes.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

class Staging {
public:
    // For a micro-batch with max_tokens tokens of one sequence and single ones of the others.
    // page_bytes: those of page_layouts().
    Staging(const std::vector<LayerShape>& layers, const std::vector<PageLayout>& layouts,
            std::size_t page_bytes, int max_tokens, int n_sequences);

    // The pages of a KV head, in a row. A sequence has some of it, beginning with one of its own.
    std::byte* const* row(std::size_t layer, int head) const {
        return pages_.data() + (first_row_[layer] + static_cast<std::size_t>(head)) * row_pages_;
    }
    std::size_t row_pages() const { return row_pages_; }
    // Pages of a row that such a part of a micro-batch takes.
    std::size_t pages_of(int n_tokens) const;
    // Single tokens may wait for the next layer, but only in the first pages of a row.
    std::size_t single_pages() const { return single_pages_; }

    std::size_t bytes() const { return memory_.size(); }

private:
    int least_entries_;  // of a page
    std::size_t single_pages_;
    std::size_t row_pages_;
    std::vector<std::size_t> first_row_;  // of each layer
    std::vector<std::byte*> pages_;
    AlignedBytes memory_;
};

}  // namespace entropykv
