// Collects training data for the predictor, called lessons. An echo shows how much attention later
// queries give to each entry of the text. For each KV head, this adds up the products of the
// entries' features (FeatureShape) and that attention; a least-squares fit needs nothing else.
#pragma once

#include <cstddef>
#include <vector>

#include "decide/rope_params.hpp"
#include "store/head.hpp"
#include "store/store_common.hpp"

namespace entropykv {

class LessonSums {
public:
    // Adds a layer with n_heads KV heads. Layers are added in order.
    void add_layer(const FeatureShape& shape, int n_heads);

    // Returns how many floats of scratch add() and add_stored() need.
    std::size_t scratch_values() const;
    // Adds the staged entries of a head. observed: the largest share of attention that a query of
    // the echo gave to each entry. inverse_rope: rotates keys back to position 0. Entries before
    // position n_sinks are left out, and so are entries with values that are not finite. scratch:
    // has scratch_values() floats.
    void add(std::size_t layer, std::size_t head, const PageLayout& layout,
             const StagedEntries& staged, const InverseRope& inverse_rope, const float* observed,
             int n_sinks, const KernelTable& kernels, float* scratch) noexcept;
    // Adds the stored entries of a head at the positions [begin, end), with the shares that an echo
    // has left in their importance.
    void add_stored(std::size_t layer, std::size_t number, const Head& head, std::int32_t begin,
                    std::int32_t end, const StoredInverseRope& inverse_rope,
                    const KernelTable& kernels, float* scratch) noexcept;

    void clear();
    // count() returns how many entries a layer's sums cover, in the head with most. sums() returns
    // [KV head][n + 1][n + 1]: the sums of the products of every two of the n features and, as the
    // last value, log(max(observed, 1e-5)).
    std::size_t count(std::size_t layer) const;
    std::vector<double> sums(std::size_t layer) const;
    std::size_t bytes() const;

private:
    struct Layer {
        FeatureShape shape;
        std::size_t n_values;                   // features, and the observed share
        std::vector<std::vector<double>> sums;  // for each head, the lower triangle row by row
    };

    std::vector<Layer> layers_{};
    std::size_t most_values_ = 0;  // length of the longest row, with padding
};

}  // namespace entropykv
