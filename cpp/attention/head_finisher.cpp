#include "attention/head_finisher.hpp"

#include <algorithm>
#include <cmath>

namespace entropykv {
namespace {

constexpr float kNatsPerBit = 0.69314718f;

}  // namespace

void HeadFinisher::finish(int head) noexcept {
    if (call_.split.by_entries) finish_tiles(head);
    call_.entropies.add_head(call_.layer, call_.split, head);
}

void HeadFinisher::run(int head) noexcept {
    finish(head);
    if (call_.reader + 1 < call_.shape().readers) {
        carry(head);
        carry_echo_shares(head);
    } else if (queues(call_.step, call_.shape(), shared_choice_)) {
        commits_.add(call_.layer, head, call_.sum_observed(head), output_squares(head));
    } else if (!shared_choice_) {
        commit(head, carry(head), carry_echo_shares(head));
    } else if (call_.units.ends_layer()) {
        commit_layer();
    }
}

void HeadFinisher::finish_tiles(int head) noexcept {
    TileWork work(call_);
    for (int number = 0; number < call_.split.tiles; ++number) {
        const RowTile tile = call_.split.tile(head, number);
        const SoftmaxState state = merge(work, tile);
        work.write_output(tile, state);
        call_.entropies.note(call_.layer, call_.split, tile, state);
        if (call_.split.by_rows) {
            work.load_queries(tile);
            work.observe(tile, state);
        } else {
            work.observe_decode(tile, state);
        }
    }
}

// Merges the partial softmaxes of a tile into that of its first chunk.
SoftmaxState HeadFinisher::merge(TileWork& work, const RowTile& tile) noexcept {
    const int chunks = call_.split.chunks(call_.total(tile.head));
    for (int r = 0; chunks > 1 && r < tile.count; ++r) merge_row(work, tile, chunks, r);
    return work.partial(tile, 0);
}

void HeadFinisher::merge_row(TileWork& work, const RowTile& tile, int chunks, int r) noexcept {
    const int stride = call_.layout().v_stride;
    const SoftmaxState all = work.partial(tile, 0);
    const float nats = call_.split.by_rows ? kNatsPerBit : 1.0f;
    float max = all.max[r];
    for (int chunk = 1; chunk < chunks; ++chunk)
        max = std::max(max, work.partial(tile, chunk).max[r]);
    float sum = 0.0f;
    float weighted = 0.0f;
    float* output = all.output + index(r) * index(stride);
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const SoftmaxState part = work.partial(tile, chunk);
        const float shift = std::max((part.max[r] - max) * nats, -200.0f);
        const float factor = part.sum[r] == 0.0f ? 0.0f : std::exp(shift);
        weighted += factor * (part.weighted[r] + part.sum[r] * shift);
        sum += factor * part.sum[r];
        const float* more = part.output + index(r) * index(stride);
        for (int d = 0; d < stride; ++d)
            output[d] = (chunk == 0 ? 0.0f : output[d]) + factor * more[d];
    }
    all.max[r] = max;
    all.sum[r] = sum;
    all.weighted[r] = weighted;
}

// Returns the sum of the squared norms of a head's outputs over the query heads of its group and
// all queries of the text, or those of the echo if there is no text; 0 if losses are not measured.
float HeadFinisher::output_squares(int head) const noexcept {
    if (!call_.store.components().common.measures_losses()) return 0.0f;
    const LayerShape& shape = call_.shape();
    const std::size_t size = index(call_.split.group * shape.v_dim);
    const int n_tokens = call_.step.n_text > 0 ? call_.step.n_text : call_.step.n_tokens;
    double sum = 0.0;
    for (int token = 0; token < n_tokens; ++token) {
        const float* output =
            call_.output + index(token * shape.n_head * shape.v_dim) + index(head) * size;
        float of_token = 0.0f;
        for (std::size_t d = 0; d < size; ++d) of_token += output[d] * output[d];
        sum += of_token;
    }
    return static_cast<float>(sum);
}

// Returns what the readers of the layer, up to this one, observed of a head; null if nothing is
// observed.
float* HeadFinisher::carry(int head) noexcept {
    float* observed = call_.sum_observed(head);
    if (call_.shape().readers == 1) return observed;
    return call_.observations.carry(call_.layer, head, call_.reader == 0, observed,
                                    output_squares(head), call_.total(head));
}

// Returns the largest shares that an echo gave to the entries of a head, over the same readers.
float* HeadFinisher::carry_echo_shares(int head) noexcept {
    float* echo_shares = call_.max_echo_shares(head);
    const LayerShape& shape = call_.shape();
    if (shape.readers == 1 || echo_shares == nullptr) return echo_shares;
    return call_.observations.carry_largest(call_.layer, shape.n_head_kv + head, call_.reader == 0,
                                            echo_shares, call_.total(head));
}

void HeadFinisher::commit(int head, const float* observed, const float* echo_shares) noexcept {
    const float squares = call_.shape().readers > 1
                              ? call_.observations.carried_squares(call_.layer, head)
                              : output_squares(head);
    call_.store.commit(call_.layer, head, call_.step.n_text, observed, echo_shares, squares,
                       call_.thread);
}

// Commits all heads by the sum of what they observed. This is possible because heads with equally
// many entries have them in the same places.
void HeadFinisher::commit_layer() noexcept {
    const int n_heads = call_.shape().n_head_kv;
    const int n = call_.total(0);
    float* shared = carry(0);
    for (int head = 1; shared != nullptr && head < n_heads; ++head)
        call_.observations.add_up(shared, carry(head), n);
    // No measure with predicted scores has a shared choice, so no echo was observed.
    for (int head = 0; head < n_heads; ++head) commit(head, shared, nullptr);
}

}  // namespace entropykv
