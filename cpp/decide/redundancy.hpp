// Finds entries whose key is similar to that of a newer entry: queries that match the one also
// match the other. Similarity is measured as in R-KV (Cai et al. 2025, arXiv:2505.24133), and the
// newest of similar entries is exempt.
#pragma once

#include <cstdint>

#include "decide/eviction.hpp"
#include "decide/kernel_types.hpp"

namespace entropykv {

constexpr float kSimilar = 0.9f;  // keys with a larger cosine are similar

// Returns by what the score of an entry is multiplied whose key has this cosine with a newer one.
inline float distinctness(float cosine) {
    return cosine <= kSimilar ? 1.0f : (1.0f - cosine) / (1.0f - kSimilar);
}

// Selects the entries that an eviction down to `keep` must decide on, and puts them first in
// order[0..n), sorted by position. Entries with higher scores stay and those with lower scores go,
// whatever they are similar to. Returns how many there are, at most kComparedKeys, which bounds the
// cost of comparing them.
int find_compared(const float* scores, const std::int32_t* positions, int n, int keep,
                  const Protection& protection, std::int32_t newest, std::int32_t* order);

// Scales a row to length 1; a row of zeros stays zero.
void normalise(float* row, int dim);

}  // namespace entropykv
