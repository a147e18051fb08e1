// Records of attention rows what policies and viewers ask for: their entropies, and the queries of
// a micro-batch, so that Python can recompute single rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/step.hpp"
#include "kernels/kernels.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

// Measures entropies of attention rows, in bits. An attention sink counts as one more entry.
class EntropyMeter {
public:
    explicit EntropyMeter(const std::vector<LayerShape>& shapes);

    void track(bool on) { tracks_ = on; }
    bool tracks() const { return tracks_; }

    // Since the last reset: sums() has the sum of the entropies of all rows of every query head of
    // a layer, over all its readers; rows() says how many rows each sum has.
    const std::vector<double>& sums(int layer) const { return layers_.at(index(layer)).sums; }
    std::int64_t rows(int layer) const { return layers_.at(index(layer)).rows; }
    void reset();
    // Returns the entropies of all rows of a layer's last reader in the last micro-batch,
    // [n_tokens][n_head], without an echo; it is empty if entropies were not tracked.
    std::vector<float> last_rows(int layer) const;

    // begin() is called before a micro-batch, note() with every tile, add_head() after the last
    // tile of a head. Entropies are in bits, while the sums of a softmax are in nats.
    void begin(const Step& step);
    void note(int layer, const Split& split, const RowTile& tile,
              const SoftmaxState& state) noexcept;
    void add_head(int layer, const Split& split, int head) noexcept;

    std::size_t bytes() const;

private:
    struct Layer {
        LayerShape shape;
        std::vector<double> sums;
        std::int64_t rows = 0;
        std::vector<float> last{};  // entropies of the last micro-batch, [KV head][row]
    };
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }

    bool tracks_ = false;
    int n_tokens_ = 0;
    int n_text_ = 0;
    std::vector<Layer> layers_;
};

// Keeps the queries of a micro-batch.
class QueryCapture {
public:
    // Holds what the attention rows of a layer's last reader were computed from.
    struct Rows {
        std::vector<float> queries;  // [n_tokens][n_head][k_dim], scaled
        std::vector<float> sinks;    // one logit per query head; kMaskedLogit: no sink
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
