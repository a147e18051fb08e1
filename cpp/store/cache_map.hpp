// Shows what every KV head holds, as the web page draws it: positions are counted in columns.
#pragma once

#include <cstdint>
#include <vector>

#include "store/head_store.hpp"

namespace entropykv {

class CacheMap {
public:
    // Counts the positions of every head in n_columns columns of per_column positions each, from
    // position `first` on.
    void count(const HeadStore& store, std::int32_t first, int per_column, int n_columns);

    // These have the results of the last count(), [KV head of all layers][column]: which share of a
    // column's positions is held, is frozen, or is held now and was frozen at the count before; in
    // 255ths, rounded up.
    const std::vector<std::uint8_t>& held() const { return held_; }
    const std::vector<std::uint8_t>& frozen() const { return frozen_; }
    const std::vector<std::uint8_t>& restored() const { return restored_; }

private:
    std::vector<std::uint8_t> held_;
    std::vector<std::uint8_t> frozen_;
    std::vector<std::uint8_t> restored_;
    std::vector<std::vector<bool>> was_frozen_;  // [KV head of all layers][position]
};

}  // namespace entropykv
