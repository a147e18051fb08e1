#include "attention/query_capture.hpp"

#include "kernels/kernels.hpp"
#include "platform/scratch.hpp"

namespace entropykv {

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
