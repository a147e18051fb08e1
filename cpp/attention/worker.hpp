// The scratch of one of ggml's threads for attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

class Worker {
public:
    // Makes room for a layer, besides all layers that it was called for before.
    void serve(const PageLayout& layout, bool recalls);
    // Makes room for the attention weights of a tile, which are kept until they are observed.
    void keep(std::size_t n_floats);
    void release();
    std::size_t bytes() const;

    float* query() { return query_.data(); }  // holds one tile
    float* kernel() { return kernel_.data(); }
    float* kept() { return kept_.data(); }
    SoftmaxState state() {
        float* softmax = softmax_.data();
        return {softmax, softmax + kRowTile, softmax + 2 * kRowTile, output_.data()};
    }
    // These hold one value per row of a tile, kRowTile each.
    float* positions() { return softmax_.data() + 3 * kRowTile; }
    float* weights() { return softmax_.data() + 4 * kRowTile; }
    float* oldest() { return softmax_.data() + 5 * kRowTile; }
    float* slopes() { return softmax_.data() + 6 * kRowTile; }
    // These hold the query rows of recall with their slopes, and the positions of those rows.
    float* recall() { return recall_.data(); }
    std::int32_t* recall_positions() { return recall_positions_.data(); }

private:
    std::vector<float> query_;
    std::vector<float> output_;  // one tile
    std::vector<float> kernel_;
    std::vector<float> kept_;
    // Holds max, sum, weighted, positions, weights, oldest and slopes of the rows of a tile.
    std::vector<float> softmax_;
    std::vector<float> recall_;
    std::vector<std::int32_t> recall_positions_;
};

// The scratch of all threads. Sequences of one model can share it.
using Workers = std::vector<Worker>;

std::size_t bytes_of_workers(const Workers& workers);

}  // namespace entropykv
