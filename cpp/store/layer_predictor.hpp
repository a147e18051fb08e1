// What predicts the scores of a layer's entries while they are staged.
#pragma once

#include "decide/features.hpp"
#include "decide/packed_importance.hpp"
#include "decide/query_statistics.hpp"
#include "kernels/kernels.hpp"

namespace entropykv {

struct LayerPredictor {
    const KernelTable* kernels = nullptr;
    const FeatureShape* shape = nullptr;  // null: scores are not predicted
    const TurnsBack* turns = nullptr;     // of the layer's RoPE
    const float* weights = nullptr;       // [KV head][feature]; null: every score is the least one

    explicit operator bool() const { return shape != nullptr; }
    // What is kept as the importance of a staged entry, once its key is there, and its value, too;
    // where the value is a part of the key, at once. turn: what turns the key back.
    float with_key(int head, const float* turn, const float* key) const noexcept {
        if (weights == nullptr) return importance_of(kLeastPrediction);
        const float sum = kernels->predict_key(*shape, of(head), key, turn);
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
