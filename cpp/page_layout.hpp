// How a page holds a fixed number of entries of one layer: K rows, V rows, positions, importance.
#pragma once

#include <cstddef>
#include <cstdint>

namespace entropykv {

enum class KvType { f16, q8_0 };

constexpr int kMaxHeadDim = 1024;
constexpr int kQuantBlock = 32;  // values that share one scale in q8_0

// Offsets in bytes from the start of a page. Rows are padded with zeros to 16 values, so that no
// kernel has a tail.
struct PageLayout {
    KvType type;
    int entries;
    int k_dim, v_dim;
    int k_stride, v_stride;  // values of a row, padded
    int k_blocks, v_blocks;  // scales of a row (q8_0)
    std::size_t k_offset, k_scale_offset, v_offset, v_scale_offset;
    std::size_t position_offset, importance_offset;
    std::size_t bytes;

    std::int32_t* positions(std::byte* page) const {
        return reinterpret_cast<std::int32_t*>(page + position_offset);
    }
    const std::int32_t* positions(const std::byte* page) const {
        return reinterpret_cast<const std::int32_t*>(page + position_offset);
    }
    float* importance(std::byte* page) const {
        return reinterpret_cast<float*>(page + importance_offset);
    }
    const float* importance(const std::byte* page) const {
        return reinterpret_cast<const float*>(page + importance_offset);
    }
};

// Layout of a page of `entries` entries with rows of k_dim and v_dim values.
PageLayout make_page_layout(KvType type, int k_dim, int v_dim, int entries);

// Copies one entry with everything that belongs to it; both pages have the same layout.
void copy_entry(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot);

}  // namespace entropykv
