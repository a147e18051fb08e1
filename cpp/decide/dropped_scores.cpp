#include "decide/dropped_scores.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace entropykv {

void DroppedScores::add(float score) noexcept {
    constexpr float kMost = std::numeric_limits<float>::max();
    if (!(score > 0.0f)) return;
    const float unshrunk = std::min(score, kMost / 2) / shrunk_;
    const int octave = std::clamp(std::ilogb(unshrunk) - kFirstOctave, 0, kOctaves - 1);
    ++counts_[index(octave)];
    float& sum = sums_[index(octave)];
    sum = std::min(sum + unshrunk, kMost);
}

void DroppedScores::halve() noexcept {
    for (float& sum : sums_) sum *= 0.5f;
    counts_[0] += counts_[1];
    sums_[0] += sums_[1];
    std::copy(counts_.begin() + 2, counts_.end(), counts_.begin() + 1);
    std::copy(sums_.begin() + 2, sums_.end(), sums_.begin() + 1);
    counts_.back() = 0;
    sums_.back() = 0.0f;
}

void DroppedScores::decay(float factor) noexcept {
    shrunk_ *= factor;
    if (shrunk_ < std::ldexp(1.0f, -kOctaves)) return forget();
    for (; shrunk_ <= 0.5f; shrunk_ *= 2.0f) halve();
}

void DroppedScores::save(std::byte* state) const {
    std::memcpy(state, &shrunk_, sizeof shrunk_);
    std::memcpy(state + sizeof shrunk_, counts_.data(), sizeof counts_);
    std::memcpy(state + sizeof shrunk_ + sizeof counts_, sums_.data(), sizeof sums_);
}

void DroppedScores::load(const std::byte* state) {
    std::memcpy(&shrunk_, state, sizeof shrunk_);
    std::memcpy(counts_.data(), state + sizeof shrunk_, sizeof counts_);
    std::memcpy(sums_.data(), state + sizeof shrunk_ + sizeof counts_, sizeof sums_);
}

bool DroppedScores::is_possible(const std::byte* state) {
    DroppedScores loaded;
    loaded.load(state);
    bool possible = loaded.shrunk_ > 0.5f && loaded.shrunk_ <= 1.0f;
    for (std::size_t i = 0; i < kOctaves; ++i)
        possible = possible && loaded.sums_[i] >= 0.0f && std::isfinite(loaded.sums_[i]) &&
                   (loaded.counts_[i] > 0 || loaded.sums_[i] == 0.0f);
    return possible;
}

void losses_at(const float* scores, int n, const DroppedScores& dropped, float unit,
               const std::vector<int>& knots, float* losses) {
    int octave = 0;
    std::int64_t kept = n;
    for (int o = 0; o < DroppedScores::kOctaves; ++o) kept += dropped.count(o);
    std::int64_t left = dropped.count(0);  // dropped entries of the octave that are not lost yet
    double lost = 0.0;
    for (std::size_t i = knots.size(); i-- > 0;) {
        // Drop the lowest score that is left, until only knots[i] entries are kept.
        while (kept > knots[i]) {
            while (left == 0 && octave + 1 < DroppedScores::kOctaves)
                left = dropped.count(++octave);
            const double mean = static_cast<double>(dropped.mean(octave)) * unit;
            if (left > 0 && (n == 0 || mean <= scores[n - 1])) {
                const std::int64_t taken = std::min(left, kept - knots[i]);
                lost += static_cast<double>(taken) * mean;
                left -= taken;
                kept -= taken;
            } else {
                lost += scores[--n];
                --kept;
            }
        }
        losses[i] = static_cast<float>(std::min(lost, double{std::numeric_limits<float>::max()}));
    }
}

}  // namespace entropykv
