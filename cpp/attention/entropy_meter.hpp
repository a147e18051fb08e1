// Measures entropies of attention rows, in bits. An attention sink counts as one more entry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/step.hpp"
#include "kernels/kernels.hpp"

namespace entropykv {

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

}  // namespace entropykv
