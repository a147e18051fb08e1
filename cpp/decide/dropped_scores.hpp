// What a KV head has dropped, by what it was worth: for every octave of scores, how many entries
// were dropped and the sum of their scores. A head with little room has dropped much that was worth
// something, which the entries that it still holds do not tell.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace entropykv {

class DroppedScores {
public:
    // Scores outside of the octaves from 2^kFirstOctave on count in the first or the last of them.
    static constexpr int kOctaves = 64;
    static constexpr int kFirstOctave = -40;

    // An entry of this score was dropped; scores of 0 are worth nothing, and not counted.
    void add(float score) noexcept;
    // Scores of entries that get nothing more shrink so, those of dropped ones too: 0 .. 1.
    void decay(float factor) noexcept;
    void forget() noexcept { *this = DroppedScores{}; }

    // How many entries of an octave there are, and their mean score, which ascends with the octave.
    std::uint32_t count(int octave) const { return counts_[index(octave)]; }
    float mean(int octave) const {
        const std::uint32_t n = count(octave);
        return n == 0 ? 0.0f : sums_[index(octave)] * shrunk_ / static_cast<float>(n);
    }

    // As bytes, for session files; a state of zeros is that of a head that has dropped nothing.
    static constexpr std::size_t state_bytes() {
        return sizeof(float) + kOctaves * (sizeof(std::uint32_t) + sizeof(float));
    }
    void save(std::byte* state) const;
    void load(const std::byte* state);
    static bool is_possible(const std::byte* state);

private:
    static std::size_t index(int octave) { return static_cast<std::size_t>(octave); }
    void halve() noexcept;

    // Sums are of scores as they were before they shrank by `shrunk_`, which is above 1/2: where it
    // would fall below, all entries move down by an octave instead.
    float shrunk_ = 1.0f;
    std::array<std::uint32_t, kOctaves> counts_{};
    std::array<float, kOctaves> sums_{};
};

// losses[i]: the sum of all but the largest knots[i] of n scores and of those that were dropped,
// which count `unit` times their mean each; scores descending, knots ascending.
void losses_at(const float* scores, int n, const DroppedScores& dropped, float unit,
               const std::vector<int>& knots, float* losses);

}  // namespace entropykv
