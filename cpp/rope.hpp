// Rotary position embedding of stored keys. A key is stored rotated by the angles of its position;
// when positions are re-based, it is rotated on by the difference, with the model's own parameters.
//
// A store counts positions of the text; llama.cpp and the model see rope_position() of them. With a
// shift, the newest tokens keep their exact distances, sinks stay where they are, and entries that
// would come before the first token after the sinks are taken to be there: the farthest distance.
// Clamping of distances: ReRoPE (Su 2023), Self-Extend (Jin et al. 2024, arXiv:2401.01325); sinks:
// StreamingLLM (Xiao et al. 2024, arXiv:2309.17453).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "head_store.hpp"
#include "kernels.hpp"
#include "rope_params.hpp"

namespace entropykv {

inline std::int32_t rope_position(std::int32_t position, int n_sinks, int shift) {
    if (position < n_sinks) return position;
    return position - shift > n_sinks ? position - shift : n_sinks;
}

// Rotates every stored key from its rope position under `old_shift` to that under `new_shift`.
// `ropes`: one for each layer. Throws std::invalid_argument where they do not fit the store.
void rebase(HeadStore& store, const KernelTable& kernels, const std::vector<RopeParams>& ropes,
            int n_sinks, int old_shift, int new_shift);

}  // namespace entropykv
