// What one of ggml's threads works with while it attends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

class Worker {
public:
    // Room for a layer, with that of all others before it.
    void serve(const PageLayout& layout, bool recalls);
    // Room for the weights of a tile, between attending and observing.
    void keep(std::size_t n_floats);
    void release();
    std::size_t bytes() const;

    float* query() { return query_.data(); }  // a tile
    float* kernel() { return kernel_.data(); }
    float* kept() { return kept_.data(); }
    SoftmaxState state() {
        float* softmax = softmax_.data();
        return {softmax, softmax + kRowTile, softmax + 2 * kRowTile, output_.data()};
    }
    // Of the rows of a tile, kRowTile each.
    float* positions() { return softmax_.data() + 3 * kRowTile; }
    float* weights() { return softmax_.data() + 4 * kRowTile; }
    float* oldest() { return softmax_.data() + 5 * kRowTile; }
    float* slopes() { return softmax_.data() + 6 * kRowTile; }
    // Query rows of recall and their slopes, and the positions of those rows.
    float* recall() { return recall_.data(); }
    std::int32_t* recall_positions() { return recall_positions_.data(); }

private:
    std::vector<float> query_;
    std::vector<float> output_;  // a tile
    std::vector<float> kernel_;
    std::vector<float> kept_;
    std::vector<float> softmax_;  // max, sum, weighted, positions, weights, oldest, slopes
    std::vector<float> recall_;
    std::vector<std::int32_t> recall_positions_;
};

// Of sequences of one model, which are attended to one after the other by every thread.
using Workers = std::vector<Worker>;

std::size_t bytes_of_workers(const Workers& workers);

}  // namespace entropykv
