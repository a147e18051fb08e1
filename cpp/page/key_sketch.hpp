// Sketches are keys of frozen entries in 4 bits per value: precise enough to find those that a
// query would attend to, without reading storage. Each channel of a group of entries has a range of
// its own (as in KIVI, Liu et al. 2024, arXiv:2402.02750), so that outlier channels do not make the
// others less precise. The sketch of a group is [k_stride / 8][16 entries] integers of 8 values
// with 4 bits each, the lowest bits first, then the minima and the steps, [k_stride] f16 each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "page/page_layout.hpp"

namespace entropykv {

constexpr int kSketchValues = 8;  // values that share an integer
constexpr int kSketchLevels = 16;

struct KeySketch {
    int k_dim;
    int k_stride;
    int n_groups;  // groups of a page

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

    // Makes the sketch of a page's keys. keys: scratch for the keys of a group,
    // [kGroupEntries][k_dim].
    void draw(const PageLayout& layout, const std::byte* page, float* keys,
              std::byte* sketch) const noexcept;
};

}  // namespace entropykv
