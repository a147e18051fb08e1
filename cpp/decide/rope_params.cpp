#include "decide/rope_params.hpp"

#include <algorithm>
#include <cmath>

namespace entropykv {
namespace {

constexpr double kPi = 3.14159265358979323846;

// Holds the pairs between which YaRN gradually takes over interpolation, as computed by
// ggml_rope_yarn_corr_dims.
struct YarnRange {
    double first;
    double last;
};

YarnRange yarn_range(const RopeParams& params) {
    const double log_base = std::log(static_cast<double>(params.freq_base));
    const auto pair_of = [&](float rotations) {
        const double turns = params.n_ctx_orig / (static_cast<double>(rotations) * 2.0 * kPi);
        return params.n_dims * std::log(turns) / (2.0 * log_base);
    };
    return {std::max(0.0, std::floor(pair_of(params.beta_fast))),
            std::min(params.n_dims - 1.0, std::ceil(pair_of(params.beta_slow)))};
}

}  // namespace

bool RopeParams::operator==(const RopeParams& other) const {
    return n_dims == other.n_dims && offset == other.offset && neox == other.neox &&
           n_ctx_orig == other.n_ctx_orig && freq_base == other.freq_base &&
           freq_scale == other.freq_scale && ext_factor == other.ext_factor &&
           beta_fast == other.beta_fast && beta_slow == other.beta_slow &&
           freq_factors == other.freq_factors;
}

std::vector<double> rope_frequencies(const RopeParams& params) {
    const YarnRange range = params.ext_factor != 0.0f ? yarn_range(params) : YarnRange{0.0, 0.0};
    std::vector<double> frequencies;
    for (int i = 0; i < params.n_dims / 2; ++i) {
        const double factor =
            params.freq_factors.empty() ? 1.0 : params.freq_factors[static_cast<std::size_t>(i)];
        const double own = std::pow(params.freq_base, -2.0 * i / params.n_dims) / factor;
        const double ramp = (i - range.first) / std::max(0.001, range.last - range.first);
        const double kept = (1.0 - std::clamp(ramp, 0.0, 1.0)) * params.ext_factor;
        frequencies.push_back(own * (params.freq_scale * (1.0 - kept) + kept));
    }
    return frequencies;
}

bool fits(const RopeParams& params, int dim) {
    const auto pairs = static_cast<std::size_t>(params.n_dims / 2);
    return params.n_dims >= 0 && params.n_dims % 2 == 0 && params.offset >= 0 &&
           params.offset + params.n_dims <= dim &&
           (params.freq_factors.empty() || params.freq_factors.size() >= pairs);
}

void rotate(const RopeParams& params, const float* angles, float* row) {
    const int pairs = params.n_dims / 2;
    const int step = params.neox ? 1 : 2;       // distance from pair to pair
    const int apart = params.neox ? pairs : 1;  // distance between the two values of a pair
    float* first = row + params.offset;
    for (int i = 0; i < pairs; ++i, first += step, angles += 2) {
        const float x = first[0];
        const float y = first[apart];
        first[0] = x * angles[0] - y * angles[1];
        first[apart] = x * angles[1] + y * angles[0];
    }
}

void InverseRope::prepare(std::int32_t first_position, int n_tokens) {
    rotations_.resize(static_cast<std::size_t>(n_tokens) * 2 * frequencies_.size());
    float* out = rotations_.data();
    for (int token = 0; token < n_tokens; ++token)
        for (const double frequency : frequencies_) {
            const double angle = -frequency * (first_position + token);
            *out++ = static_cast<float>(std::cos(angle));
            *out++ = static_cast<float>(std::sin(angle));
        }
}

const InverseRope& InverseRopes::of(const RopeParams& rope) {
    const auto known = std::find_if(ropes_.begin(), ropes_.end(), [&](const InverseRope& inverse) {
        return inverse.rope() == rope;
    });
    return known != ropes_.end() ? *known : ropes_.emplace_back(rope);
}

void InverseRopes::prepare(std::int32_t rope_position, int n_tokens) {
    for (InverseRope& inverse : ropes_) inverse.prepare(rope_position, n_tokens);
}

std::size_t InverseRopes::bytes() const {
    std::size_t bytes = 0;
    for (const InverseRope& inverse : ropes_) bytes += inverse.bytes();
    return bytes;
}

}  // namespace entropykv
