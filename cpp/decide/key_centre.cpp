#include "decide/key_centre.hpp"

#include <algorithm>
#include <cmath>
#include <complex>
#include <stdexcept>

namespace entropykv {
namespace {

// A channel's unit is its size to this power: between 1, which makes all channels equally precise
// relative to their sizes, and 0.5, which also keeps the largest ones precise, because queries may
// look at them most.
constexpr double kUnitPower = 0.75;
// Queries are rounded to 16 bits in these units, and the spread is an estimate, so no channel is
// taken to be more than this many times smaller than the largest one.
constexpr double kMostRatio = 256.0;

std::size_t index(int i) { return static_cast<std::size_t>(i); }

// Returns the mean of e^(i * position * frequency) over the centred positions.
std::complex<double> mean_turn(double frequency) {
    const std::complex<double> step = std::polar(1.0, frequency);
    if (std::abs(step - 1.0) < 1e-9) return 1.0;
    const double last = frequency * kCentredPositions;
    return (std::polar(1.0, last) - 1.0) / (step - 1.0) / double{kCentredPositions};
}

void check(const std::vector<float>& bias, const std::vector<float>& spread, const RopeParams& rope,
           float magnitude) {
    const auto finite = [](float value) { return std::isfinite(value); };
    if (bias.empty() || bias.size() != spread.size() || !fits(rope, static_cast<int>(bias.size())))
        throw std::invalid_argument("a bias of keys that does not fit their RoPE");
    if (!std::all_of(bias.begin(), bias.end(), finite) ||
        !std::all_of(spread.begin(), spread.end(), finite) || !finite(magnitude))
        throw std::invalid_argument("a bias of keys that is not a number");
}

}  // namespace

KeyCentre key_centre(const std::vector<float>& bias, const std::vector<float>& spread,
                     const RopeParams& rope, float magnitude) {
    check(bias, spread, rope, magnitude);
    // The centre of a channel that is not rotated is its whole bias.
    KeyCentre found{bias, {}};
    std::vector<double> sizes;
    for (const float of_channel : spread) sizes.push_back(std::abs(double{of_channel}));
    const std::vector<double> frequencies = rope_frequencies(rope);
    const int pairs = rope.n_dims / 2;
    for (int i = 0; i < pairs; ++i) {
        const std::size_t first = index(rope.offset + (rope.neox ? i : 2 * i));
        const std::size_t second = first + index(rope.neox ? pairs : 1);
        const std::complex<double> of_pair(bias[first], bias[second]);
        const std::complex<double> mean =
            of_pair * mean_turn(frequencies[index(i)]) * double{magnitude};
        found.centre[first] = static_cast<float>(mean.real());
        found.centre[second] = static_cast<float>(mean.imag());
        // The size of a channel is the root of the mean square of what the centre leaves of a key.
        const double left =
            std::norm(of_pair) * double{magnitude} * double{magnitude} - std::norm(mean);
        const double rest = double{magnitude} * std::hypot(spread[first], spread[second]);
        sizes[first] = sizes[second] = std::sqrt((std::max(left, 0.0) + rest * rest) / 2.0);
    }
    const double largest = *std::max_element(sizes.begin(), sizes.end());
    for (const double size : sizes) {
        const double unit = std::pow(std::max(size, largest / kMostRatio), kUnitPower);
        found.unit.push_back(largest > 0.0 ? static_cast<float>(unit) : 1.0f);
    }
    return found;
}

}  // namespace entropykv
