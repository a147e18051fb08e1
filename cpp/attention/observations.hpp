// What queries give to entries, from when they attend until it is committed.
#pragma once

#include <cstddef>
#include <vector>

#include "decide/measures.hpp"

namespace entropykv {

class Observations {
public:
    Observations(const Measure& measure, std::size_t n_layers)
        : measure_(measure), carried_(n_layers) {}

    struct Room {             // that a micro-batch needs
        std::size_t longest;  // entries of the longest head, staged ones included
        std::size_t rows;     // of a layer: its heads times their observed bands
        std::size_t logits;   // rows of the decode kernel: query heads of a layer
        bool single;          // one token, whose commits may wait for the next layer
    };
    void begin(const Room& room);
    // looking_up: carry_largest() will be called, too.
    void begin_carrying(int layer, std::size_t n_heads, bool looking_up);
    void release();

    // The logits of a row of the decode kernel, and the room that one takes.
    float* logits(int row) noexcept { return logits_.data() + index(row) * longest_; }
    std::size_t longest() const { return longest_; }
    // What the rows of an observed band gave to the entries of a head, added up tile by tile;
    // number: of the layer's heads times bands.
    float* row(int layer, int number) noexcept {
        const std::size_t turn = layer % 2 == 0 ? 0 : second_turn_;
        return observed_.data() + turn + index(number) * longest_;
    }
    // Adds up so many rows from one on, of n entries, in the first of them, as the measure does.
    float* sum(int layer, int first, int n_rows, int n) noexcept;
    // The largest of so many rows, in the first of them.
    float* largest(int layer, int first, int n_rows, int n) noexcept;
    // Adds up what two sets of queries gave to each of n entries, or takes the larger one.
    void add_up(float* total, const float* more, int n) const noexcept;

    // Adds up what the readers of a layer saw of a head, and the squares of its outputs; returns
    // what they saw up to this one. observed: null where they saw nothing.
    float* carry(int layer, int head, bool is_first, const float* observed, float squares,
                 int n) noexcept;
    // The largest that the readers of a layer up to this one looked up; number: of the heads,
    // behind those whose sums are carried.
    float* carry_largest(int layer, int number, bool is_first, const float* looked_up,
                         int n) noexcept;
    float carried_squares(int layer, int head) const noexcept {
        return carried_[index(layer)].squares[index(head)];
    }

    std::size_t bytes() const;

private:
    struct Carried {                  // what a layer's readers saw, but for the last one
        std::vector<float> observed;  // [head][longest], then [head][longest] of what was looked up
        std::vector<float> squares;   // [head]
    };
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }

    const Measure& measure_;
    std::size_t longest_ = 0;
    std::vector<float> logits_;     // [row][longest]
    std::vector<float> observed_;   // [row][longest], of single tokens for two layers in turn
    std::size_t second_turn_ = 0;   // where those of layers of odd numbers begin
    std::vector<Carried> carried_;  // of each layer
};

}  // namespace entropykv
