#include "page_layout.hpp"

#include <cstring>

namespace entropykv {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

int padded(int dim) { return (dim + 15) / 16 * 16; }

void copy_row(std::size_t offset, std::size_t bytes, const std::byte* from, int from_slot,
              std::byte* to, int to_slot) {
    std::memcpy(to + offset + bytes * static_cast<std::size_t>(to_slot),
                from + offset + bytes * static_cast<std::size_t>(from_slot), bytes);
}

}  // namespace

PageLayout make_page_layout(KvType type, int k_dim, int v_dim, int entries) {
    PageLayout layout{};
    layout.type = type;
    layout.entries = entries;
    layout.k_dim = k_dim;
    layout.v_dim = v_dim;
    layout.k_stride = padded(k_dim);
    layout.v_stride = padded(v_dim);
    const bool quantised = type == KvType::q8_0;
    layout.k_blocks = quantised ? (layout.k_stride + kQuantBlock - 1) / kQuantBlock : 0;
    layout.v_blocks = quantised ? (layout.v_stride + kQuantBlock - 1) / kQuantBlock : 0;
    const std::size_t n = static_cast<std::size_t>(entries);
    const std::size_t value = quantised ? 1 : 2;
    std::size_t end = 0;
    const auto place = [&](std::size_t bytes) {
        const std::size_t start = end;
        end = aligned(end + bytes);
        return start;
    };
    layout.k_offset = place(n * value * static_cast<std::size_t>(layout.k_stride));
    layout.k_scale_offset = place(n * 2 * static_cast<std::size_t>(layout.k_blocks));
    layout.v_offset = place(n * value * static_cast<std::size_t>(layout.v_stride));
    layout.v_scale_offset = place(n * 2 * static_cast<std::size_t>(layout.v_blocks));
    layout.position_offset = place(n * sizeof(std::int32_t));
    layout.importance_offset = place(n * sizeof(float));
    layout.bytes = end;
    return layout;
}

void copy_entry(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot) {
    const std::size_t value = layout.type == KvType::q8_0 ? 1 : 2;
    copy_row(layout.k_offset, value * static_cast<std::size_t>(layout.k_stride), from, from_slot,
             to, to_slot);
    copy_row(layout.v_offset, value * static_cast<std::size_t>(layout.v_stride), from, from_slot,
             to, to_slot);
    if (layout.type == KvType::q8_0) {
        copy_row(layout.k_scale_offset, 2 * static_cast<std::size_t>(layout.k_blocks), from,
                 from_slot, to, to_slot);
        copy_row(layout.v_scale_offset, 2 * static_cast<std::size_t>(layout.v_blocks), from,
                 from_slot, to, to_slot);
    }
    layout.positions(to)[to_slot] = layout.positions(from)[from_slot];
    layout.importance(to)[to_slot] = layout.importance(from)[from_slot];
}

}  // namespace entropykv
