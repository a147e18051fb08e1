#include "decide/query_statistics.hpp"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>

namespace entropykv {
namespace {

// Returns the mean of e^(i * frequency * t) over the n positions t after `newest`.
std::complex<double> mean_rotation(double frequency, std::int32_t newest, int n) {
    const double half = 0.5 * frequency;
    const double length =
        std::abs(std::sin(half)) < 1e-12 ? 1.0 : std::sin(n * half) / (n * std::sin(half));
    return std::polar(1.0, frequency * newest + half * (n + 1)) * length;
}

}  // namespace

QueryStatistics::QueryStatistics(int group, int dim)
    : dim_(static_cast<std::size_t>(dim)), sums_(1 + 2 * static_cast<std::size_t>(group) * dim_) {}

void QueryStatistics::start(float factor, std::int32_t newest) {
    for (float& sum : sums_) sum *= factor;
    newest_ = newest;
}

void QueryStatistics::add(int query_head, const float* row, float weight) {
    float* values = sums_.data() + 1 + static_cast<std::size_t>(query_head) * dim_;
    float* squares = values + (sums_.size() - 1) / 2;
    for (std::size_t d = 0; d < dim_; ++d) {
        values[d] += weight * row[d];
        squares[d] += weight * row[d] * row[d];
    }
}

void QueryStatistics::finish() {
    const auto finite = [](float sum) { return std::isfinite(sum); };
    if (!std::all_of(sums_.begin(), sums_.end(), finite))
        std::fill(sums_.begin(), sums_.end(), 0.0f);
}

void QueryStatistics::expect(int query_head, const InverseRope& inverse_rope, int n_future,
                             float* mean, float* half_variance) const {
    const float* values = sums_.data() + 1 + static_cast<std::size_t>(query_head) * dim_;
    const float* squares = values + (sums_.size() - 1) / 2;
    const float scale = sums_[0] > 0.0f ? 1.0f / sums_[0] : 0.0f;
    for (std::size_t d = 0; d < dim_; ++d) {
        mean[d] = values[d] * scale;
        half_variance[d] = 0.5f * std::max(squares[d] * scale - mean[d] * mean[d], 0.0f);
    }
    const RopeParams& rope = inverse_rope.rope();
    const std::size_t pairs = inverse_rope.frequencies().size();
    const std::size_t step = rope.neox ? 1 : 2;
    const std::size_t apart = rope.neox ? pairs : 1;
    std::size_t first = static_cast<std::size_t>(rope.offset);
    for (std::size_t i = 0; i < pairs; ++i, first += step) {
        const std::size_t second = first + apart;
        const std::complex<double> rotation =
            mean_rotation(inverse_rope.frequencies()[i], newest_, n_future);
        const std::complex<double> now{mean[first], mean[second]};
        const std::complex<double> then = now * rotation;
        // The rotation spreads the mean over a circle, which adds to the variance.
        const double turning = 0.5 * (std::norm(now) - std::norm(then));
        const double variance = half_variance[first] + half_variance[second] + turning;
        mean[first] = static_cast<float>(then.real());
        mean[second] = static_cast<float>(then.imag());
        half_variance[first] = half_variance[second] = static_cast<float>(0.5 * variance);
    }
}

void QueryStatistics::reset() {
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    newest_ = 0;
}

std::size_t QueryStatistics::state_bytes() const {
    return sums_.empty() ? 0 : sizeof newest_ + sums_.size() * sizeof(float);
}

void QueryStatistics::save(std::byte* state) const {
    if (sums_.empty()) return;
    std::memcpy(state, &newest_, sizeof newest_);
    std::memcpy(state + sizeof newest_, sums_.data(), sums_.size() * sizeof(float));
}

void QueryStatistics::load(const std::byte* state) {
    if (sums_.empty()) return;
    std::memcpy(&newest_, state, sizeof newest_);
    std::memcpy(sums_.data(), state + sizeof newest_, sums_.size() * sizeof(float));
}

bool QueryStatistics::is_possible(const std::byte* state, std::size_t bytes) {
    if (bytes == 0) return true;
    std::int32_t newest;
    std::memcpy(&newest, state, sizeof newest);
    bool possible = newest >= 0;
    for (std::size_t at = sizeof newest; at < bytes; at += sizeof(float)) {
        float sum;
        std::memcpy(&sum, state + at, sizeof sum);
        possible = possible && std::isfinite(sum) && (at > sizeof newest || sum >= 0.0f);
    }
    return possible;
}

}  // namespace entropykv
