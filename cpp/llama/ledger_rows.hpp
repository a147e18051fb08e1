// Writes and reads what the ledger of a device store has in the place of an entry's K and V: the
// number of its row on the device, and the norm of its value. See device_store.hpp.
#pragma once

#include <algorithm>
#include <cmath>

#include "platform/half.hpp"

namespace entropykv {

// Entries of the ledger have so many values; two of them are used.
constexpr int kLedgerDim = 16;
// A row's number takes two values, each of which f16 holds exactly.
constexpr int kRowBase = 2048;

inline void write_row_number(float* key, int row) {
    std::fill_n(key, kLedgerDim, 0.0f);
    key[0] = static_cast<float>(row / kRowBase);
    key[1] = static_cast<float>(row % kRowBase);
}

inline int row_number(const float* key) {
    return static_cast<int>(key[0]) * kRowBase + static_cast<int>(key[1]);
}

// Writes a value of the ledger with the squared norm of the entry's value. Two values hold it more
// exactly than one f16.
inline void write_norm(float* value, float squared) {
    std::fill_n(value, kLedgerDim, 0.0f);
    const float norm = std::sqrt(std::max(squared, 0.0f));
    const float rounded = half_to_float(float_to_half(std::min(norm, 60000.0f)));
    // The first must not be larger than the norm, since squares only add up.
    value[0] =
        rounded > norm ? half_to_float(float_to_half(norm * (1.0f - 1.0f / 1024.0f))) : rounded;
    value[1] = std::sqrt(std::max(norm * norm - value[0] * value[0], 0.0f));
}

}  // namespace entropykv
