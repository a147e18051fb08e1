// Predicts the distribution of later queries: takes mean and variance of the queries so far, before
// RoPE rotated them, and rotates them to the next positions. Scores by expected attention use this
// (Devoto et al. 2025, arXiv:2510.00636).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/inverse_rope.hpp"

namespace entropykv {

// Holds the statistics of the query heads of one KV head. Sums decay like importance. The values of
// a query are assumed to vary independently, and both values of a rotation pair equally, so that no
// rotation changes their variance.
class QueryStatistics {
public:
    QueryStatistics() = default;
    QueryStatistics(int group, int dim);

    // Must be called before the queries of a micro-batch whose last rope position is `newest`.
    // Earlier queries count `factor` times as much from now on.
    void start(float factor, std::int32_t newest);
    // count() adds a token, and add() its query of one head of the group, scaled and rotated back
    // to position 0.
    void count(float weight) { sums_[0] += weight; }
    void add(int query_head, const float* row, float weight);
    // Must be called after the last query. If a sum is not finite, it could never recover, so all
    // statistics are reset.
    void finish();

    // Returns the mean and half of the variance of a query head's queries at the next `n_future`
    // positions.
    void expect(int query_head, const InverseRope& inverse_rope, int n_future, float* mean,
                float* half_variance) const;

    void reset();
    std::size_t state_bytes() const;
    void save(std::byte* state) const;
    void load(const std::byte* state);
    static bool is_possible(const std::byte* state, std::size_t bytes);

private:
    std::size_t dim_ = 0;
    std::int32_t newest_ = 0;
    std::vector<float> sums_;  // weight, [query head][dim] of values, [query head][dim] of squares
};

}  // namespace entropykv
