// The linear functions that predict what an entry is worth from its key and value, one for every KV
// head: of a pool, since all of its sequences are of one model.
#pragma once

#include <cstddef>
#include <vector>

#include "platform/scratch.hpp"

namespace entropykv {

class PredictorWeights {
public:
    explicit PredictorWeights(std::size_t n_layers) : layers_(n_layers) {}

    // Of a layer, [KV head][feature]; empty: none, as it is at first.
    void set(std::size_t layer, std::vector<float> weights) {
        layers_.at(layer) = std::move(weights);
    }
    // Those of a layer, or null.
    const float* of(std::size_t layer) const {
        return layers_[layer].empty() ? nullptr : layers_[layer].data();
    }
    std::size_t bytes() const {
        std::size_t bytes = 0;
        for (const std::vector<float>& weights : layers_) bytes += bytes_of(weights);
        return bytes;
    }

private:
    std::vector<std::vector<float>> layers_;
};

}  // namespace entropykv
