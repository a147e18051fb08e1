#include "attention/row_records.hpp"

#include <algorithm>
#include <cmath>

#include "platform/scratch.hpp"

namespace entropykv {
namespace {

constexpr float kBitsPerNat = 1.44269504f;

}  // namespace

EntropyMeter::EntropyMeter(const std::vector<LayerShape>& shapes) {
    for (const LayerShape& shape : shapes)
        layers_.push_back({shape, std::vector<double>(index(shape.n_head), 0.0)});
}

void EntropyMeter::reset() {
    for (Layer& layer : layers_) {
        std::fill(layer.sums.begin(), layer.sums.end(), 0.0);
        layer.rows = 0;
    }
}

void EntropyMeter::begin(const Step& step) {
    n_tokens_ = step.n_tokens;
    n_text_ = step.n_text;
    for (Layer& layer : layers_)
        if (tracks_) grow(layer.last, index(n_tokens_ * layer.shape.n_head));
}

std::vector<float> EntropyMeter::last_rows(int layer) const {
    const Layer& from = layers_.at(index(layer));
    const int n_head = from.shape.n_head;
    const Split split = Split::of(from.shape, n_tokens_);
    std::vector<float> rows(index(n_text_ * n_head), 0.0f);
    if (from.last.size() < rows.size()) return {};
    for (int token = 0; token < n_text_; ++token)
        for (int head = 0; head < n_head; ++head)
            rows[index(token * n_head + head)] = from.last[index(
                head / split.group * split.rows + token * split.group + head % split.group)];
    return rows;
}

void EntropyMeter::note(int layer, const Split& split, const RowTile& tile,
                        const SoftmaxState& state) noexcept {
    if (!tracks_) return;
    std::vector<float>& last = layers_[index(layer)].last;
    for (int r = 0; r < tile.count; ++r) {
        // A query that is not a number has no entropy, and must not spoil the sums of the others.
        const float nats = std::log(state.sum[r]) - state.weighted[r] / state.sum[r];
        last[index(tile.head * split.rows + tile.first + r)] =
            nats > 0.0f ? nats * kBitsPerNat : 0.0f;
    }
}

void EntropyMeter::add_head(int layer, const Split& split, int head) noexcept {
    if (!tracks_) return;
    Layer& to = layers_[index(layer)];
    for (int row = 0; row < n_text_ * split.group; ++row)
        to.sums[index(head * split.group + row % split.group)] +=
            to.last[index(head * split.rows + row)];
    if (head == 0) to.rows += n_text_;
}

std::size_t EntropyMeter::bytes() const {
    std::size_t bytes = 0;
    for (const Layer& layer : layers_) bytes += bytes_of(layer.last);
    return bytes;
}

void QueryCapture::begin(int n_tokens) {
    n_tokens_ = n_tokens;
    for (std::size_t i = 0; captures_ && i < shapes_.size(); ++i) {
        const LayerShape& shape = shapes_[i];
        const auto n_head = static_cast<std::size_t>(shape.n_head);
        layers_[i].queries.resize(static_cast<std::size_t>(n_tokens * shape.n_head * shape.k_dim));
        layers_[i].sinks.resize(n_head);
        layers_[i].slopes.resize(n_head);
    }
}

void QueryCapture::take(int layer, const AttentionParams& params, const RowsView& query) noexcept {
    const LayerShape& shape = shapes_[static_cast<std::size_t>(layer)];
    Rows& rows = layers_[static_cast<std::size_t>(layer)];
    float* out = rows.queries.data();
    for (int token = 0; token < n_tokens_; ++token)
        for (int head = 0; head < shape.n_head; ++head)
            for (int d = 0; d < shape.k_dim; ++d) *out++ = query.row(token, head)[d] * params.scale;
    for (std::size_t head = 0; head < rows.sinks.size(); ++head)
        rows.sinks[head] = params.sinks != nullptr ? params.sinks[head] : kMaskedLogit;
    for (std::size_t head = 0; head < rows.slopes.size(); ++head)
        rows.slopes[head] = params.slopes != nullptr ? params.slopes[head] : 0.0f;
    rows.softcap = params.softcap;
}

std::size_t QueryCapture::bytes() const {
    std::size_t bytes = 0;
    for (const Rows& rows : layers_) bytes += bytes_of(rows.queries);
    return bytes;
}

}  // namespace entropykv
