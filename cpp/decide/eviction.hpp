// Scores + a number to keep + protected entries -> which entries survive. A pure decision.
#pragma once

#include <cstdint>

namespace entropykv {

// What no eviction may take: the first positions (sinks) and the newest ones. What has left the
// sliding window of its layer goes before anything else.
struct Protection {
    int n_sinks;
    int recent_window;
    std::int32_t oldest = 0;  // that a later query sees

    bool has_left(std::int32_t position) const { return position < oldest; }
    bool covers(std::int32_t position, std::int32_t newest) const {
        return !has_left(position) && (position < n_sinks || position > newest - recent_window);
    }
    bool leaves_open(std::int32_t position, std::int32_t newest) const {
        return !has_left(position) && !covers(position, newest);
    }
    // The same sinks, and half of a budget for both.
    Protection within(int budget) const {
        return {n_sinks, budget / 2 > n_sinks ? budget / 2 - n_sinks : 1, oldest};
    }
};

constexpr int kDecodeRoom = 16;

// How many entries an eviction leaves when n_new of them came last. While tokens come one by one,
// room is made for several at once (kDecodeRoom), so that one selection serves many tokens: never
// more room than a quarter of what the budget holds beyond the protected entries.
int entries_to_keep(int budget, int n_new, const Protection& protection);

// Marks in kept[0..n) the survivors of n entries: every protected one, then those with the highest
// scores (ties: the earlier index) until `keep` are marked; none that has left its window. Returns
// how many are marked: more than `keep` only where more are protected, fewer only where there are
// no more. scratch holds n floats. No allocation.
int select_survivors(const float* scores, const std::int32_t* positions, int n, int keep,
                     const Protection& protection, std::int32_t newest, std::uint8_t* kept,
                     float* scratch);

}  // namespace entropykv
