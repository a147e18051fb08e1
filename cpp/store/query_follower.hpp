// For scores by expected attention: what the queries of every KV head were so far.
#pragma once

#include <cstdint>

#include "store/rope_turns.hpp"
#include "store/store_common.hpp"

namespace entropykv {

class QueryFollower {
public:
    QueryFollower(const StoreCommon& common, RopeTurns& turns) : common_(common), turns_(turns) {}

    // Whether anybody needs them.
    bool follows() const { return common_.measure().evidence == Evidence::expectation; }
    // Begins with the heads of a layer. Throws std::invalid_argument for RoPE parameters that do
    // not fit its queries.
    void follow(std::size_t layer, std::vector<Head>& heads);
    // Before a micro-batch that RoPE sees at `rope_position`; and before it is committed, with the
    // queries of a KV head: row(token, query head of the group).
    void prepare(std::int32_t rope_position) { rope_position_ = rope_position; }
    template <typename Row>
    void add(Head& head, int n_tokens, float scale, Row row) const noexcept;

private:
    const StoreCommon& common_;
    RopeTurns& turns_;
    std::int32_t rope_position_ = 0;
};

template <typename Row>
void QueryFollower::add(Head& head, int n_tokens, float scale, Row row) const noexcept {
    if (!follows()) return;
    const float decay = common_.importance().decay;
    QueryStatistics& queries = head.queries;
    queries.start(decay_factor(decay, n_tokens), rope_position_ + n_tokens - 1);
    float turned[kMaxHeadDim];
    for (int token = 0; token < n_tokens; ++token) {
        const float weight = decay_factor(decay, n_tokens - 1 - token);
        queries.count(weight);
        for (int g = 0; g < head.group(); ++g) {
            const float* query = row(token, g);
            for (int d = 0; d < head.shape().k_dim; ++d) turned[d] = query[d] * scale;
            head.turns->turn_back(token, turned);
            queries.add(g, turned, weight);
        }
    }
    queries.finish();
}

}  // namespace entropykv
