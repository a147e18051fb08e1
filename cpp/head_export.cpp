// The entries of a head as f32, for those who look at them from outside.
#include <algorithm>

#include "head_store.hpp"
#include "simd.hpp"

namespace entropykv {
namespace {

void load_v(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    const std::byte* values = page + layout.v_offset;
    const auto* scales = reinterpret_cast<const std::uint16_t*>(page + layout.v_scale_offset);
    for (int d = 0; d < layout.v_dim; ++d) {
        const std::size_t place = layout.v_index(slot, d);
        if (layout.type == KvType::f16) {
            out[d] = half_to_float(reinterpret_cast<const std::uint16_t*>(values)[place]);
        } else {
            const auto scale =
                scales[PageLayout::scale_index(layout.v_blocks, slot, d / kQuantBlock)];
            out[d] = static_cast<float>(reinterpret_cast<const std::int8_t*>(values)[place]) *
                     half_to_float(scale);
        }
    }
}

}  // namespace

void load_k(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    if (layout.type == KvType::f16) {
        const auto* k = reinterpret_cast<const std::uint16_t*>(page + layout.k_offset) +
                        layout.k_index(slot, 0);
        for (int d = 0; d < layout.k_dim; ++d) out[d] = half_to_float(k[d * kGroupEntries]);
        return;
    }
    const auto* k =
        reinterpret_cast<const std::uint8_t*>(page + layout.k_offset) + layout.k_index(slot, 0);
    const auto* scales = reinterpret_cast<const std::uint16_t*>(page + layout.k_scale_offset);
    float scale = 0.0f;
    for (int d = 0; d < layout.k_dim; ++d) {
        if (d % kQuantBlock == 0)
            scale = half_to_float(
                scales[PageLayout::scale_index(layout.k_blocks, slot, d / kQuantBlock)]);
        const int byte = k[d / 4 * 4 * kGroupEntries + quad_place(d)] - 0x80;
        out[d] = static_cast<float>(byte) * scale;
    }
}

StoredRows HeadStore::rows(int layer_index, int head_index) const {
    const Layer& layer = layers_.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    const PageLayout& layout = layer.layout;
    StoredRows rows;
    std::vector<std::pair<std::int32_t, int>> order;
    for (int i = 0; i < head.count; ++i) {
        const Slot slot = stored_slot(layer, head, i);
        order.emplace_back(layout.positions(slot.page)[slot.index], i);
    }
    std::sort(order.begin(), order.end());
    rows.k.resize(order.size() * index(layout.k_dim));
    rows.v.resize(order.size() * index(layout.v_dim));
    float* k = rows.k.data();
    float* v = rows.v.data();
    for (const auto& [position, i] : order) {
        const Slot slot = stored_slot(layer, head, i);
        load_k(layout, slot.page, slot.index, k);
        load_v(layout, slot.page, slot.index, v);
        rows.positions.push_back(position);
        rows.importance.push_back(layout.importance(slot.page)[slot.index]);
        k += layout.k_dim;
        v += layout.v_dim;
    }
    return rows;
}

}  // namespace entropykv
