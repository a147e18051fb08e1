#include "decide/eviction.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <functional>

namespace entropykv {
namespace {

// Of so few scores, sorting a part finds one faster than counting does.
constexpr int kFew = 512;
// Scores are counted by so many bits at a time.
constexpr int kCountedBits = 11;

// Returns a number that is higher for a higher score.
std::uint32_t order_of(float score) {
    std::uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return (bits >> 31U) != 0 ? ~bits : bits | 0x80000000U;
}

// Returns how many of the lowest bits differ between the numbers of n scores, up to the highest
// one that does.
int differing_bits(const float* scores, int n) {
    std::uint32_t in_any = 0;
    std::uint32_t in_all = ~0U;
    for (int i = 0; i < n; ++i) {
        in_any |= order_of(scores[i]);
        in_all &= order_of(scores[i]);
    }
    int n_bits = 0;
    while (n_bits < 32 && ((in_any ^ in_all) >> n_bits) != 0) ++n_bits;
    return n_bits;
}

// Returns the score that is the wanted-th highest of n, which are put in another order. Scores are
// counted by their highest bits, and only those remain that share these with the wanted one: a
// partial sort of all would take a jump for every score that a CPU cannot predict.
float highest(float* scores, int n, int wanted) {
    for (int end = differing_bits(scores, n); n > kFew && end > 0;) {
        const int begin = std::max(0, end - kCountedBits);
        const std::uint32_t last = (1U << (end - begin)) - 1;
        const auto bits_of = [&](float score) { return order_of(score) >> begin & last; };
        std::array<int, std::size_t{1} << kCountedBits> counts{};
        for (int i = 0; i < n; ++i) ++counts[bits_of(scores[i])];
        std::uint32_t bits = last;
        while (counts[bits] < wanted) wanted -= counts[bits--];
        int n_left = 0;
        for (int i = 0; i < n; ++i) {
            const float score = scores[i];
            scores[n_left] = score;
            n_left += bits_of(score) == bits ? 1 : 0;
        }
        n = n_left;
        end = begin;
    }
    std::nth_element(scores, scores + (wanted - 1), scores + n, std::greater<float>());
    return scores[wanted - 1];
}

}  // namespace

int most_decode_room(int budget) {
    return std::clamp(budget / kMostDecodeRoom, kDecodeRoom, kMostDecodeRoom);
}

int entries_to_keep(int budget, int n_new, const Protection& protection) {
    const int beyond = budget - protection.n_sinks - protection.recent_window;
    const int room = std::clamp(beyond / 4, 1, most_decode_room(beyond));
    return n_new >= room ? budget : budget - room + n_new;
}

int select_survivors(const float* scores, const std::int32_t* positions, int n, int keep,
                     const Protection& protection, std::int32_t newest, std::uint8_t* kept,
                     float* scratch) {
    // Loops have no branches that depend on scores or positions: a CPU could not predict such
    // branches. The bounds are copied, since the compiler must expect that writing marks changes
    // what it refers to.
    const std::int32_t oldest = protection.oldest;
    const std::int32_t first = protection.first_open();
    const std::int32_t last = protection.last_open(newest);
    int n_kept = 0;
    for (int i = 0; i < n; ++i) {
        const bool closed = (positions[i] < first) | (positions[i] > last);
        const bool covered = closed & (positions[i] >= oldest);
        kept[i] = covered ? 1 : 0;
        n_kept += covered ? 1 : 0;
    }
    int n_candidates = 0;
    for (int i = 0; i < n; ++i) {
        const bool open = (positions[i] >= first) & (positions[i] <= last);
        scratch[n_candidates] = scores[i];
        n_candidates += open ? 1 : 0;
    }
    int wanted = std::min(keep - n_kept, n_candidates);
    if (wanted <= 0) return n_kept;
    const float threshold = highest(scratch, n_candidates, wanted);
    int n_above = 0;
    for (int i = 0; i < n; ++i) {
        const bool open = (positions[i] >= first) & (positions[i] <= last);
        const bool above = open & (scores[i] > threshold);
        kept[i] = static_cast<std::uint8_t>(kept[i] | (above ? 1 : 0));
        n_above += above ? 1 : 0;
    }
    n_kept += n_above;
    wanted -= n_above;
    for (int i = 0; i < n && wanted > 0; ++i) {
        if (scores[i] != threshold || !protection.leaves_open(positions[i], newest)) continue;
        kept[i] = 1;
        ++n_kept;
        --wanted;
    }
    return n_kept;
}

}  // namespace entropykv
