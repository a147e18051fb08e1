// What a layer's K and V are made of, and what its queries see.
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
    int window = 0;        // sliding window in tokens; 0: none
    bool chunked = false;  // the window begins at multiples of its size, and does not slide
    bool latent = false;   // V is the first v_dim values of K (multi-head latent attention)
    int readers = 1;       // layers of the model that attend to its entries, one after another

    // Values that an entry of a KV head is made of.
    int entry_values() const { return k_dim + (latent ? 0 : v_dim); }
    // The oldest position that a query sees.
    std::int32_t oldest_seen(std::int32_t query) const {
        if (window == 0) return 0;
        return chunked ? query / window * window : query - window + 1;
    }
    // The first query that sees nothing at or before a position.
    std::int32_t first_blind(std::int32_t position) const {
        return chunked ? (position / window + 1) * window : position + window;
    }
};

// The longest text: positions and sums of two of them fit into 32 bits, differences within a
// context of llama.cpp, too.
constexpr std::int32_t kMostPositions = std::int32_t{1} << 30;

constexpr int kPageEntries = 16;  // of the layer with the largest entries

// Pages have the same bytes in every layer; a layer with smaller entries has more of them in one.
std::size_t pool_page_bytes(const std::vector<LayerShape>& layers, KvType type);
std::vector<PageLayout> page_layouts(const std::vector<LayerShape>& layers, KvType type);
// Of a page of frozen entries, of the layer where it is largest; layers with windows freeze
// nothing.
std::size_t cold_page_bytes(const std::vector<LayerShape>& layers, KvType type, ColdType cold_type);

}  // namespace entropykv
