// Keeps the queries of a micro-batch, so that Python can recompute single attention rows.
#pragma once

#include <cstddef>
#include <vector>

#include "attention/step.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

class QueryCapture {
public:
    // Holds what the attention rows of a layer's last reader were computed from.
    struct Rows {
        std::vector<float> queries;  // [n_tokens][n_head][k_dim], scaled
        std::vector<float> sinks;    // one logit per query head; kMaskedLogit: it has no sink
        // One slope per query head; 0: logits do not depend on the distance.
        std::vector<float> slopes;
        float softcap = 0.0f;
    };

    explicit QueryCapture(const std::vector<LayerShape>& shapes)
        : shapes_(shapes), layers_(shapes.size()) {}

    void enable(bool on) { captures_ = on; }
    bool captures() const { return captures_; }
    const Rows& of(int layer) const { return layers_.at(static_cast<std::size_t>(layer)); }

    // begin() is called before a micro-batch, take() with the queries of every reader of a layer.
    void begin(int n_tokens);
    void take(int layer, const AttentionParams& params, const RowsView& query) noexcept;

    std::size_t bytes() const;

private:
    bool captures_ = false;
    int n_tokens_ = 0;
    std::vector<LayerShape> shapes_;
    std::vector<Rows> layers_;
};

}  // namespace entropykv
