// The entries of a head as f32, for those who look at them from outside.
#include <algorithm>

#include "head_store.hpp"
#include "simd.hpp"

namespace entropykv {
namespace {

void read_row(const PageLayout& layout, const std::byte* row, const std::byte* scales, int dim,
              float* out) {
    const auto* block_scales = reinterpret_cast<const std::uint16_t*>(scales);
    for (int d = 0; d < dim; ++d) {
        if (layout.type == KvType::f16) {
            out[d] = half_to_float(reinterpret_cast<const std::uint16_t*>(row)[d]);
        } else {
            out[d] = static_cast<float>(reinterpret_cast<const std::int8_t*>(row)[d]) *
                     half_to_float(block_scales[d / kQuantBlock]);
        }
    }
}

}  // namespace

StoredRows HeadStore::rows(int layer_index, int head_index) const {
    const Layer& layer = layers_.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    const PageLayout& layout = layer.layout;
    const std::size_t value = layout.type == KvType::q8_0 ? 1 : 2;
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
        const std::size_t n = index(slot.index);
        read_row(layout, slot.page + layout.k_offset + n * value * index(layout.k_stride),
                 slot.page + layout.k_scale_offset + 2 * n * index(layout.k_blocks), layout.k_dim,
                 k);
        read_row(layout, slot.page + layout.v_offset + n * value * index(layout.v_stride),
                 slot.page + layout.v_scale_offset + 2 * n * index(layout.v_blocks), layout.v_dim,
                 v);
        rows.positions.push_back(position);
        rows.importance.push_back(layout.importance(slot.page)[slot.index]);
        k += layout.k_dim;
        v += layout.v_dim;
    }
    return rows;
}

}  // namespace entropykv
