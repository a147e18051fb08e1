#include "store/query_follower.hpp"

#include <stdexcept>

namespace entropykv {

void QueryFollower::follow(std::size_t layer, std::vector<Head>& heads) {
    const RopeParams rope = common_.settings.rope_of(layer);
    if (!fits(rope, heads.front().shape().k_dim))
        throw std::invalid_argument("RoPE parameters that do not fit the queries of a layer");
    const TurnsBack& turns = turns_.of(rope);
    for (Head& head : heads) {
        head.turns = &turns;
        head.queries = QueryStatistics(head.group(), head.shape().k_dim);
    }
}

}  // namespace entropykv
