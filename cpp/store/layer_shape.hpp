// Describes the K and V of a layer, and which positions its queries attend to.
#pragma once

#include <cstdint>
#include <vector>

#include "decide/freezing.hpp"
#include "page/page_layout.hpp"

namespace entropykv {

struct LayerShape {
    int n_head;     // query heads
    int n_head_kv;  // KV heads
    int k_dim;
    int v_dim;
    int window = 0;          // sliding window in tokens; 0: none
    bool chunked = false;    // windows begin at multiples of their size, and do not slide
    bool latent = false;     // V is the first v_dim values of K (multi-head latent attention)
    int readers = 1;         // layers of the model that attend to the entries, one after another
    bool elsewhere = false;  // K and V are not in pages: see PageLayout

    int entry_values() const { return k_dim + (latent ? 0 : v_dim); }
    // Returns the oldest position that the query at a position attends to; 0 or less: it attends to
    // the whole text.
    std::int32_t oldest_seen(std::int32_t query) const {
        if (window == 0) return 0;
        return chunked ? query / window * window : query - window + 1;
    }
    // Returns the position of the first query that attends to nothing at or before a position; only
    // for a layer with a window.
    std::int32_t first_blind(std::int32_t position) const {
        return chunked ? (position / window + 1) * window : position + window;
    }
};

// Bounds the length of a text, so that sums of two positions fit into 32 bits, and so do
// differences within a context of llama.cpp.
constexpr std::int32_t kMostPositions = std::int32_t{1} << 30;

constexpr int kPageEntries = 16;  // entries of a page in the layer with the largest entries

// All pages have the same number of bytes; layers with smaller entries have more entries per page.
// Both throw std::invalid_argument for impossible layers.
std::size_t pool_page_bytes(const std::vector<LayerShape>& layers, KvType type);
std::vector<PageLayout> page_layouts(const std::vector<LayerShape>& layers, KvType type);
// Returns the bytes of a page of frozen entries in the layer where they are largest. Layers with
// windows do not count, since they freeze nothing.
std::size_t cold_page_bytes(const std::vector<LayerShape>& layers, KvType type, ColdType cold_type);

}  // namespace entropykv
