// What queries to come are likely to be: mean and variance of the queries so far, before RoPE
// turned them, turned on to the next positions. For scores by expected attention (Devoto et al.
// 2025, arXiv:2510.00636).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/rope_params.hpp"

namespace entropykv {

// Cosines and sines that turn the rows of a micro-batch back to position 0.
class TurnsBack {
public:
    explicit TurnsBack(const RopeParams& rope)
        : rope_(rope), frequencies_(rope_frequencies(rope)) {}

    const RopeParams& rope() const { return rope_; }
    const std::vector<double>& frequencies() const { return frequencies_; }
    void prepare(std::int32_t first_position, int n_tokens);
    // Of a token: [pair][cosine, sine].
    const float* of(int token) const {
        return turns_.data() + static_cast<std::size_t>(token) * 2 * frequencies_.size();
    }
    void turn_back(int token, float* row) const { rotate(rope_, of(token), row); }
    std::size_t bytes() const { return turns_.capacity() * sizeof(float); }

private:
    RopeParams rope_;
    std::vector<double> frequencies_;
    std::vector<float> turns_;  // [token][pair][cosine, sine]
};

// Of the query heads of one KV head. Sums decay, as importance does; the parts of a query are taken
// to vary independently, and the two of a pair of RoPE's equally, which no rotation changes.
class QueryStatistics {
public:
    QueryStatistics() = default;
    QueryStatistics(int group, int dim);

    // Before the queries of a micro-batch that ends at rope position `newest`: what was so far
    // counts `factor` times as much as it did.
    void start(float factor, std::int32_t newest);
    // A token, and its query of every head, scaled and turned back to position 0; query_head: of
    // the group.
    void count(float weight) { sums_[0] += weight; }
    void add(int query_head, const float* row, float weight);
    // After the last one: forgets everything where a sum is no number any more, since it would stay
    // so for good.
    void finish();

    // Mean and half the variance of a query head's queries at the `n_future` positions to come.
    void expect(int query_head, const TurnsBack& turns, int n_future, float* mean,
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
