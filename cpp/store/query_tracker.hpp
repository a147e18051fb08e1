// Keeps statistics of the queries of every KV head, for scores by expected attention.
#pragma once

#include <cstdint>

#include "decide/inverse_rope.hpp"
#include "store/store_common.hpp"

namespace entropykv {

class QueryTracker {
public:
    QueryTracker(const StoreCommon& common, InverseRopes& inverse_ropes)
        : common_(common), inverse_ropes_(inverse_ropes) {}

    // Tells whether the measure needs these statistics.
    bool tracks() const { return common_.measure().evidence == Evidence::expectation; }
    // Starts tracking the queries of a layer's heads. Throws std::invalid_argument if the RoPE
    // parameters do not fit the queries.
    void track(std::size_t layer, std::vector<Head>& heads);
    // prepare() must be called before a micro-batch that RoPE sees at `rope_position`. add() must
    // be called before a KV head is committed; row(token, query head of the group) returns a query.
    void prepare(std::int32_t rope_position) { rope_position_ = rope_position; }
    template <typename Row>
    void add(Head& head, int n_tokens, float scale, Row row) const noexcept;

private:
    const StoreCommon& common_;
    InverseRopes& inverse_ropes_;
    std::int32_t rope_position_ = 0;
};

template <typename Row>
void QueryTracker::add(Head& head, int n_tokens, float scale, Row row) const noexcept {
    if (!tracks()) return;
    const float decay = common_.importance().decay;
    QueryStatistics& queries = head.queries;
    queries.start(decay_factor(decay, n_tokens), rope_position_ + n_tokens - 1);
    float rotated[kMaxHeadDim];
    for (int token = 0; token < n_tokens; ++token) {
        const float weight = decay_factor(decay, n_tokens - 1 - token);
        queries.count(weight);
        for (int g = 0; g < head.group(); ++g) {
            const float* query = row(token, g);
            for (int d = 0; d < head.shape().k_dim; ++d) rotated[d] = query[d] * scale;
            head.inverse_rope->rotate_back(token, rotated);
            queries.add(g, rotated, weight);
        }
    }
    queries.finish();
}

}  // namespace entropykv
