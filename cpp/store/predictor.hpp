// Holds linear functions that predict, from the key and the value of an entry, the largest share of
// attention that a later query will give to it: one function for every KV head.
#pragma once

#include <cstddef>
#include <vector>

#include "decide/features.hpp"
#include "decide/importance.hpp"
#include "decide/rope_params.hpp"
#include "kernels/kernels.hpp"
#include "platform/scratch.hpp"

namespace entropykv {

class PredictorWeights {
public:
    explicit PredictorWeights(std::size_t n_layers) : layers_(n_layers) {}

    // Sets the weights of a layer, [KV head][feature]; empty: the layer has none.
    void set(std::size_t layer, std::vector<float> weights) {
        layers_.at(layer) = std::move(weights);
    }
    // Returns the weights of a layer, or null.
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

struct LayerPredictor {
    const KernelTable* kernels = nullptr;
    const FeatureShape* shape = nullptr;        // null: scores are not predicted
    const InverseRope* inverse_rope = nullptr;  // inverts the RoPE of the layer
    // Holds [KV head][feature]; null means that every predicted share is the smallest one.
    const float* weights = nullptr;

    explicit operator bool() const { return shape != nullptr; }
    // with_key() and with_value() return what is stored as the importance of a staged entry: after
    // its key was staged, then after its value was. If the value is a part of the key, with_key()
    // returns the final importance. rotation: rotates the key back to position 0.
    float with_key(int head, const float* rotation, const float* key) const noexcept {
        if (weights == nullptr) return importance_of(kLeastPrediction);
        const float sum = kernels->predict_key(*shape, of(head), key, rotation);
        return shape->v_dim > 0 ? sum : importance_of(predicted_share(sum));
    }
    float with_value(int head, float sum_of_key, const float* value) const noexcept {
        if (weights == nullptr) return importance_of(kLeastPrediction);
        return importance_of(
            predicted_share(sum_of_key + kernels->predict_value(*shape, of(head), value)));
    }

private:
    static float importance_of(float share) noexcept {
        return PackedImportance(0.0f, share).packed();
    }
    const float* of(int head) const {
        return weights + static_cast<std::size_t>(head) * static_cast<std::size_t>(shape->n);
    }
};

}  // namespace entropykv
