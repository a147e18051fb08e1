// The entries of a head as f32, for those who look at them from outside.
#include <algorithm>

#include "store/head_store.hpp"

namespace entropykv {

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
        rows.importance.push_back(stored_importance(layer, head, i));
        k += layout.k_dim;
        v += layout.v_dim;
    }
    return rows;
}

}  // namespace entropykv
