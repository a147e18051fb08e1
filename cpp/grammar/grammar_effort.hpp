// Bounds what a grammar may cost, and lets the caller stop a search.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace entropykv {

struct GrammarLimits {
    std::size_t most_symbols = 250000;   // all rules together may have so many
    std::size_t most_repeats = 1000000;  // largest number in {m,n}
    std::size_t most_stacks = 32768;     // in how many ways a text may be parsed at a time
    std::uint64_t most_work = 20000000;  // steps for one token: about a second
    std::size_t most_kept = 1000000;     // stacks, states and transitions that are kept
};

// Counts the steps of a search, and throws std::length_error if there are too many.
class GrammarEffort {
public:
    // `poll` is called every few milliseconds; an exception from it ends the search.
    GrammarEffort(std::uint64_t most_work, std::function<void()> poll)
        : most_work_(most_work), poll_(std::move(poll)) {}

    // Starts counting from 0.
    void begin() {
        done_ = 0;
        next_ = kBetweenPolls;
    }
    void spend(std::uint64_t n_steps) {
        done_ += n_steps;
        if (done_ >= next_) look_up();
    }

private:
    static constexpr std::uint64_t kBetweenPolls = 100000;

    void look_up();

    std::uint64_t most_work_;
    std::function<void()> poll_;
    std::uint64_t done_ = 0;
    std::uint64_t next_ = kBetweenPolls;
};

}  // namespace entropykv
