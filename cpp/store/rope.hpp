// Rotary position embedding of stored keys. A key is stored rotated by the angles of its position.
// If positions are moved, it is rotated further by the difference, with the model's own parameters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/rope_params.hpp"
#include "kernels/kernels.hpp"
#include "store/head_store.hpp"

namespace entropykv {

// Rotates every stored key from its RoPE position under `old_shift` to that under `new_shift`
// (rope_position()); the first n_sinks positions stay. ropes: one for each layer. Throws
// std::invalid_argument if they do not fit the store.
void rebase(HeadStore& store, const KernelTable& kernels, const std::vector<RopeParams>& ropes,
            int n_sinks, int old_shift, int new_shift);

}  // namespace entropykv
