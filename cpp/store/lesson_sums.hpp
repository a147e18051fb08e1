// Lessons for a predictor: of entries that a repetition of their text has looked up, the sums of
// products of what they are told by (FeatureShape) and how much they were looked at. A linear
// function is fitted to them alone.
#pragma once

#include <cstddef>
#include <vector>

#include "store/head.hpp"
#include "store/rope_turns.hpp"
#include "store/store_common.hpp"

namespace entropykv {

class LessonSums {
public:
    // Of a layer's KV heads, in the order of the layers.
    void add_layer(const FeatureShape& shape, int n_heads);

    // Floats that add() works with.
    std::size_t scratch_values() const;
    // Adds the staged entries of a head, whose keys `turns` turns back; observed: the largest
    // share of attention that a query of the repetition gave to each of them. Those before
    // position n_sinks are left out, and those that are no numbers. scratch: scratch_values().
    void add(std::size_t layer, std::size_t head, const PageLayout& layout,
             const StagedEntries& staged, const TurnsBack& turns, const float* observed,
             int n_sinks, const KernelTable& kernels, float* scratch) noexcept;
    // Adds the stored entries of a head at the positions from `begin` to before `end`: what an echo
    // has shown of them is kept in their importance.
    void add_stored(std::size_t layer, std::size_t number, const Head& head, std::int32_t begin,
                    std::int32_t end, const StoredTurns& turns, const KernelTable& kernels,
                    float* scratch) noexcept;

    void clear();
    // How many entries a layer's sums are of, and the sums of products of every two of the features
    // and log(max(observed, 1e-5)) behind them: [KV head][n + 1][n + 1].
    std::size_t count(std::size_t layer) const;
    std::vector<double> sums(std::size_t layer) const;
    std::size_t bytes() const;

private:
    struct Layer {
        FeatureShape shape;
        std::size_t n_values;                   // the features and what was observed
        std::vector<std::vector<double>> sums;  // of each head: the lower triangle, row by row
    };

    std::vector<Layer> layers_{};
    std::size_t most_values_ = 0;  // of a row, with zeros behind it
};

}  // namespace entropykv
