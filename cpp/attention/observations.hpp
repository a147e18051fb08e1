// Holds what queries give to entries, from the time they attend until the entries are committed.
#pragma once

#include <cstddef>
#include <vector>

#include "decide/measures.hpp"

namespace entropykv {

class Observations {
public:
    Observations(const Measure& measure, std::size_t n_layers)
        : measure_(measure), carried_(n_layers) {}

    // Says how much memory a micro-batch needs.
    struct Room {
        std::size_t longest;  // entries of the longest head, staged ones included
        std::size_t rows;     // rows of a layer: its heads times their observed bands
        std::size_t logits;   // rows of logits of the decode kernel: query heads of a layer
        bool single;          // whether it has one token, whose commits may wait for the next layer
    };
    void begin(const Room& room);
    // observing_echo: carry_largest() will be called, too.
    void begin_carrying(int layer, std::size_t n_heads, bool observing_echo);
    void release();

    // Returns where the decode kernel puts the logits of a row; longest() says how many fit.
    float* logits(int row) noexcept { return logits_.data() + index(row) * longest_; }
    std::size_t longest() const { return longest_; }
    // Returns the row to which the tiles of an observed band of a head add what their queries gave.
    // number: that of the head, times the observed bands of a head, plus that of the band. Rows for
    // the shares of an echo lie behind those of all heads.
    float* row(int layer, int number) noexcept {
        const std::size_t offset = layer % 2 == 0 ? 0 : odd_layers_at_;
        return observed_.data() + offset + index(number) * longest_;
    }
    // Combines n_rows rows from `first` on, of n entries each, as the measure does, and returns the
    // result, which is in the first row.
    float* sum(int layer, int first, int n_rows, int n) noexcept;
    // Returns the maximum of n_rows rows, which is in the first row.
    float* largest(int layer, int first, int n_rows, int n) noexcept;
    // Combines what two sets of queries gave to each of n entries: their sum, or for some measures
    // the larger one.
    void add_up(float* total, const float* more, int n) const noexcept;

    // Combines what the readers of a layer observed of a head, and adds up the squares of its
    // outputs. Returns the result up to this reader. observed: null if this reader observed
    // nothing.
    float* carry(int layer, int head, bool is_first, const float* observed, float squares,
                 int n) noexcept;
    // Returns the largest shares that an echo's queries gave, over the readers of a layer up to
    // this one. number: that of the head plus the number of KV heads.
    float* carry_largest(int layer, int number, bool is_first, const float* echo_shares,
                         int n) noexcept;
    float carried_squares(int layer, int head) const noexcept {
        return carried_[index(layer)].squares[index(head)];
    }

    std::size_t bytes() const;

private:
    // Holds what the readers of a layer observed so far.
    struct Carried {
        std::vector<float> observed;  // [head][longest], then the same for shares of an echo
        std::vector<float> squares;   // [head]
    };
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }

    const Measure& measure_;
    std::size_t longest_ = 0;
    std::vector<float> logits_;  // [row][longest]
    // Holds [row][longest]. For single tokens, even and odd layers use different rows.
    std::vector<float> observed_;
    std::size_t odd_layers_at_ = 0;  // rows of odd layers begin there
    std::vector<Carried> carried_;   // one for each layer
};

}  // namespace entropykv
