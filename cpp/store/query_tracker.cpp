#include "store/query_tracker.hpp"

#include <stdexcept>

namespace entropykv {

void QueryTracker::track(std::size_t layer, std::vector<Head>& heads) {
    const RopeParams rope = common_.settings.rope_of(layer);
    if (!fits(rope, heads.front().shape().k_dim))
        throw std::invalid_argument("RoPE parameters that do not fit the queries of a layer");
    const InverseRope& inverse_rope = inverse_ropes_.of(rope);
    for (Head& head : heads) {
        head.inverse_rope = &inverse_rope;
        head.queries = QueryStatistics(head.group(), head.shape().k_dim);
    }
}

}  // namespace entropykv
