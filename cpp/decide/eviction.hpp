// Selects the entries that survive an eviction, given their scores, how many to keep, and which are
// protected. Pure functions.
#pragma once

#include <cstdint>

namespace entropykv {

// Says which entries are protected: the first positions (sinks) and the newest ones. Entries that
// have left the sliding window of their layer are evicted before any others.
struct Protection {
    int n_sinks = 0;
    int recent_window = 0;
    std::int32_t oldest = 0;  // oldest position that later queries see

    bool has_left(std::int32_t position) const { return position < oldest; }
    // Entries at positions from first_open() to last_open(), both included, are neither protected,
    // nor has the sliding window of their layer passed them.
    std::int32_t first_open() const { return n_sinks > oldest ? n_sinks : oldest; }
    std::int32_t last_open(std::int32_t newest) const { return newest - recent_window; }
    bool leaves_open(std::int32_t position, std::int32_t newest) const {
        return position >= first_open() && position <= last_open(newest);
    }
    bool covers(std::int32_t position, std::int32_t newest) const {
        return !has_left(position) && !leaves_open(position, newest);
    }
    bool operator==(const Protection& other) const {
        return n_sinks == other.n_sinks && recent_window == other.recent_window &&
               oldest == other.oldest;
    }
    // Returns what is protected in a head whose recent window depends on its own budget: sinks and
    // recent window together take at most half of the budget; if sinks alone do, the window has at
    // most one entry.
    Protection within(int budget) const {
        const int half = budget / 2 > n_sinks ? budget / 2 - n_sinks : 1;
        return {n_sinks, half < recent_window ? half : recent_window, oldest};
    }
};

constexpr int kDecodeRoom = 16;
constexpr int kMostDecodeRoom = 64;

// Returns for how many tokens an eviction to a budget makes room at most, if tokens come one by
// one: for more with a larger budget, where a selection takes longer.
int most_decode_room(int budget);
// Returns how many entries an eviction leaves, including n_new new ones. If tokens come one by one,
// it makes room for several (most_decode_room()), so that one selection serves many tokens. The
// room is at least 1, and at most a quarter of the budget beyond the protected entries.
int entries_to_keep(int budget, int n_new, const Protection& protection);

// Marks in kept[0..n) which of n entries survive: all protected ones, then those with the highest
// scores (of equal ones the earlier) until `keep` are marked, but none that has left its window.
// Returns how many are marked: more than `keep` only if more are protected, fewer only if there are
// too few candidates. scratch has room for n floats. Does not allocate.
int select_survivors(const float* scores, const std::int32_t* positions, int n, int keep,
                     const Protection& protection, std::int32_t newest, std::uint8_t* kept,
                     float* scratch);

}  // namespace entropykv
