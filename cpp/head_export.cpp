// The entries of a head as f32, for those who look at them from outside.
#include <algorithm>

#include "head_store.hpp"
#include "simd.hpp"

namespace entropykv {
namespace {

// Value d of an entry, at `place` of its array of values; `scales` belongs to that array.
float read_value(const PageLayout& layout, const std::byte* values, std::size_t place,
                 const std::byte* scales, std::size_t scale_place, int offset) {
    if (layout.type == KvType::f16)
        return half_to_float(reinterpret_cast<const std::uint16_t*>(values)[place]);
    const int byte = static_cast<int>(reinterpret_cast<const std::uint8_t*>(values)[place]);
    return static_cast<float>(static_cast<std::int8_t>(byte ^ offset)) *
           half_to_float(reinterpret_cast<const std::uint16_t*>(scales)[scale_place]);
}

void read_v(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    for (int d = 0; d < layout.v_dim; ++d)
        out[d] = read_value(layout, page + layout.v_offset, layout.v_index(slot, d),
                            page + layout.v_scale_offset,
                            layout.scale_index(layout.v_blocks, slot, d / kQuantBlock), 0);
}

}  // namespace

void load_k(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    for (int d = 0; d < layout.k_dim; ++d)
        out[d] = read_value(layout, page + layout.k_offset, layout.k_index(slot, d),
                            page + layout.k_scale_offset,
                            layout.scale_index(layout.k_blocks, slot, d / kQuantBlock), 0x80);
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
        read_v(layout, slot.page, slot.index, v);
        rows.positions.push_back(position);
        rows.importance.push_back(layout.importance(slot.page)[slot.index]);
        k += layout.k_dim;
        v += layout.v_dim;
    }
    return rows;
}

}  // namespace entropykv
