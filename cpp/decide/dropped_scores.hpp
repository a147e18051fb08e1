// Remembers the scores of the entries that a KV head has dropped: for every octave of scores, how
// many entries were dropped and the sum of their scores. The held entries alone would underestimate
// the loss of a head with a small budget, which has dropped entries with high scores.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace entropykv {

class DroppedScores {
public:
    // Octave 0 begins at 2^kFirstOctave, and also counts lower scores; the last octave also counts
    // scores above it.
    static constexpr int kOctaves = 64;
    static constexpr int kFirstOctave = -40;

    // Counts a dropped entry with this score; a score of 0 is ignored, since dropping it loses
    // nothing.
    void add(float score) noexcept;
    // Multiplies all scores by a factor from 0 to 1, as the scores of held entries decay.
    void decay(float factor) noexcept;
    void forget() noexcept { *this = DroppedScores{}; }

    // Return how many entries an octave has, and their mean score; without entries, 0.
    std::uint32_t count(int octave) const { return counts_[index(octave)]; }
    float mean(int octave) const {
        const std::uint32_t n = count(octave);
        return n == 0 ? 0.0f : sums_[index(octave)] * shrunk_ / static_cast<float>(n);
    }

    // Save and load the object as bytes for session files. is_possible() tells whether save() can
    // have written the bytes.
    static constexpr std::size_t state_bytes() {
        return sizeof(float) + kOctaves * (sizeof(std::uint32_t) + sizeof(float));
    }
    void save(std::byte* state) const;
    void load(const std::byte* state);
    static bool is_possible(const std::byte* state);

private:
    static std::size_t index(int octave) { return static_cast<std::size_t>(octave); }
    void halve() noexcept;

    // Sums are not multiplied when scores decay; the factor is collected in `shrunk_`. Before it
    // would fall to 1/2, all octaves move down by one and it is doubled.
    float shrunk_ = 1.0f;
    std::array<std::uint32_t, kOctaves> counts_{};
    std::array<float, kOctaves> sums_{};
};

// Sets losses[i] to the sum of all but the largest knots[i] of n scores and the dropped scores,
// where a dropped score counts as `unit` times the mean of its octave. Scores must descend, knots
// ascend.
void losses_at(const float* scores, int n, const DroppedScores& dropped, float unit,
               const std::vector<int>& knots, float* losses);

}  // namespace entropykv
