#include "store/cache_map.hpp"

#include <algorithm>
#include <cstddef>

namespace entropykv {

namespace {

class Columns {
public:
    Columns(std::int32_t first, int per_column, int n_columns)
        : first_(first), per_column_(per_column), counts_(static_cast<std::size_t>(n_columns)) {}

    void add(std::int32_t position) {
        const std::int32_t offset = position - first_;
        if (offset < 0) return;
        const auto column = static_cast<std::size_t>(offset / per_column_);
        if (column < counts_.size()) ++counts_[column];
    }

    // Appends the shares of a KV head's columns, and begins with the next head.
    void flush(std::vector<std::uint8_t>& shares) {
        for (int& count : counts_) {
            const std::int64_t share = (std::int64_t{255} * count + per_column_ - 1) / per_column_;
            shares.push_back(static_cast<std::uint8_t>(std::min<std::int64_t>(share, 255)));
            count = 0;
        }
    }

private:
    std::int32_t first_;
    int per_column_;
    std::vector<int> counts_;
};

bool contains(const std::vector<bool>& positions, std::int32_t position) {
    const auto i = static_cast<std::size_t>(position);
    return i < positions.size() && positions[i];
}

}  // namespace

void CacheMap::count(const HeadStore& store, std::int32_t first, int per_column, int n_columns) {
    for (auto* shares : {&held_, &frozen_, &restored_}) shares->clear();
    Columns held(first, per_column, n_columns);
    Columns frozen(first, per_column, n_columns);
    Columns restored(first, per_column, n_columns);
    std::size_t row = 0;
    for (int layer = 0; layer < store.n_layers(); ++layer) {
        for (int head = 0; head < store.shape(layer).n_head_kv; ++head, ++row) {
            if (row == was_frozen_.size()) was_frozen_.emplace_back();
            std::vector<bool>& was_frozen = was_frozen_[row];
            const Head& of_row = store.head(layer, head);
            for (int i = 0; i < of_row.count(); ++i) {
                held.add(of_row.position(i));
                if (contains(was_frozen, of_row.position(i))) restored.add(of_row.position(i));
            }
            std::fill(was_frozen.begin(), was_frozen.end(), false);
            of_row.frozen.for_each_frozen([&](std::int32_t position) {
                frozen.add(position);
                const auto i = static_cast<std::size_t>(position);
                if (i >= was_frozen.size()) was_frozen.resize(2 * (i + 1));
                was_frozen[i] = true;
            });
            held.flush(held_);
            frozen.flush(frozen_);
            restored.flush(restored_);
        }
    }
}

}  // namespace entropykv
