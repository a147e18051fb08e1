// The entries of a head for those who look at them from outside.
#pragma once

#include <cstdint>
#include <vector>

#include "store/head.hpp"

namespace entropykv {

// Entries as attention reads them, positions ascending.
struct StoredRows {
    std::vector<std::int32_t> positions;
    std::vector<float> importance;
    std::vector<float> k;  // [entries][k_dim]
    std::vector<float> v;  // [entries][v_dim]
};

StoredRows rows_of(const Head& head);
std::vector<std::int32_t> positions_of(const Head& head);  // ascending
std::vector<float> importance_of(const Head& head);        // of positions_of(), in order

}  // namespace entropykv
