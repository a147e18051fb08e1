// Entries whose key says what a newer one's says: queries that look for the one find the other.
// Similarity of keys as R-KV measures it (Cai et al. 2025, arXiv:2505.24133), the newest of similar
// ones being exempt.
#pragma once

#include <cstdint>

#include "decide/contest.hpp"
#include "decide/eviction.hpp"

namespace entropykv {

constexpr float kSimilar = 0.9f;  // cosine of two keys from which on the older one counts less

// What is left of the score of an entry whose key has this cosine with a newer one's.
inline float distinctness(float cosine) {
    return cosine <= kSimilar ? 1.0f : (1.0f - cosine) / (1.0f - kSimilar);
}

// Puts those of n entries that an eviction down to `keep` decides on first in order[0..n), by
// position, and returns how many there are, kContest at most: what ranks higher stays and what
// ranks lower goes, whatever it is similar to. That bounds the cost of comparing them.
int find_contest(const float* scores, const std::int32_t* positions, int n, int keep,
                 const Protection& protection, std::int32_t newest, std::int32_t* order);

// Scales a row to length 1; a row of zeros stays one.
void normalise(float* row, int dim);

}  // namespace entropykv
