#include "store/head_rows.hpp"

#include <algorithm>
#include <utility>

namespace entropykv {
namespace {

// Positions and numbers of the entries, in the order of their positions.
std::vector<std::pair<std::int32_t, int>> ordered(const Head& head) {
    std::vector<std::pair<std::int32_t, int>> order;
    for (int i = 0; i < head.count(); ++i) order.emplace_back(head.position(i), i);
    std::sort(order.begin(), order.end());
    return order;
}

}  // namespace

StoredRows rows_of(const Head& head) {
    const PageLayout& layout = head.layout();
    StoredRows rows;
    const auto order = ordered(head);
    rows.k.resize(order.size() * PageLayout::index(layout.k_dim));
    rows.v.resize(order.size() * PageLayout::index(layout.v_dim));
    float* k = rows.k.data();
    float* v = rows.v.data();
    for (const auto& [position, i] : order) {
        const Slot slot = head.place(i);
        load_k(layout, slot.page, slot.index, k);
        load_v(layout, slot.page, slot.index, v);
        rows.positions.push_back(position);
        rows.importance.push_back(head.importance(i));
        k += layout.k_dim;
        v += layout.v_dim;
    }
    return rows;
}

std::vector<std::int32_t> positions_of(const Head& head) {
    std::vector<std::int32_t> positions;
    for (const auto& [position, i] : ordered(head)) positions.push_back(position);
    return positions;
}

std::vector<float> importance_of(const Head& head) {
    std::vector<float> importance;
    for (const auto& [position, i] : ordered(head)) importance.push_back(head.importance(i));
    return importance;
}

}  // namespace entropykv
