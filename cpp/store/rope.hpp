// Moves stored keys to other positions. RoPE has rotated a stored key by the angles of its
// position, so it is rotated further by those of the difference, with the model's own parameters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/rope_params.hpp"
#include "kernels/kernels.hpp"
#include "store/head_store.hpp"

namespace entropykv {

// Rotates every stored or frozen key from its RoPE position under `old_shift` to that under
// `new_shift` (rope_position()); the first n_sinks positions stay. ropes: one for each layer.
// Throws std::invalid_argument if they do not fit the store, and std::logic_error if the pool has
// no pages for copies of shared ones.
void rebase(HeadStore& store, const KernelTable& kernels, const std::vector<RopeParams>& ropes,
            int n_sinks, int old_shift, int new_shift);

}  // namespace entropykv
