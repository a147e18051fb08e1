#include "store/query_follower.hpp"

#include <algorithm>
#include <stdexcept>

namespace entropykv {

void QueryFollower::follow(std::size_t layer, std::vector<Head>& heads) {
    const std::vector<RopeParams>& ropes = common_.settings.ropes;
    const RopeParams rope = ropes.empty() ? RopeParams{} : ropes.at(layer);
    if (!fits(rope, heads.front().shape().k_dim))
        throw std::invalid_argument("RoPE parameters that do not fit the queries of a layer");
    auto known = std::find_if(turns_.begin(), turns_.end(),
                              [&](const TurnsBack& turns) { return turns.rope() == rope; });
    if (known == turns_.end()) {
        turns_.emplace_back(rope);
        known = std::prev(turns_.end());
    }
    for (Head& head : heads) {
        head.turns = &*known;
        head.queries = QueryStatistics(head.group(), head.shape().k_dim);
    }
}

void QueryFollower::prepare(std::int32_t rope_position, int n_tokens) {
    rope_position_ = rope_position;
    for (TurnsBack& turns : turns_) turns.prepare(rope_position, n_tokens);
}

}  // namespace entropykv
