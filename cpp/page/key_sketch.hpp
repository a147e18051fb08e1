// Keys of frozen entries in 4 bits: enough to see which of them a query would attend to, without
// the storage that holds them. Every value of a key has the range of its group's entries (per
// channel, as in KIVI, Liu et al. 2024, arXiv:2402.02750), so that outliers among the channels cost
// the others nothing. A sketch of a group: [k_stride / 8][16 entries] of 8 values in 4 bits each,
// the lowest bits first; then the least values and the steps, [k_stride] f16 each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "page/page_layout.hpp"

namespace entropykv {

constexpr int kSketchValues = 8;  // that share an integer
constexpr int kSketchLevels = 16;

struct KeySketch {
    int k_dim;
    int k_stride;
    int n_groups;  // of a page

    explicit KeySketch(const PageLayout& layout)
        : k_dim(layout.k_dim),
          k_stride(layout.k_stride),
          n_groups(layout.entries / kGroupEntries) {}

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    std::size_t codes_bytes() const {
        return index(k_stride / kSketchValues * kGroupEntries) * sizeof(std::uint32_t);
    }
    std::size_t group_bytes() const {
        return codes_bytes() + index(2 * k_stride) * sizeof(std::uint16_t);
    }
    std::size_t page_bytes() const { return group_bytes() * index(n_groups); }

    const std::uint16_t* least(const std::byte* group) const {
        return reinterpret_cast<const std::uint16_t*>(group + codes_bytes());
    }
    const std::uint16_t* steps(const std::byte* group) const { return least(group) + k_stride; }

    // Of a page's keys; keys: room for a group's, [kGroupEntries][k_dim].
    void draw(const PageLayout& layout, const std::byte* page, float* keys,
              std::byte* sketch) const noexcept;
};

}  // namespace entropykv
