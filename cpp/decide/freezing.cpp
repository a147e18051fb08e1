#include "decide/freezing.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace entropykv {

ColdType cold_type_named(const std::string& name) {
    if (name == "as stored") return ColdType::as_stored;
    if (name == "q8_0") return ColdType::q8_0;
    if (name == "q4_0") return ColdType::q4_0;
    throw std::invalid_argument("cold storage holds entries as stored, or in q8_0 or q4_0");
}

Detections detected(Detections detections, std::int32_t now, int history) {
    constexpr int kMost = 65535;
    const std::int32_t number = history > 0 ? now / history : 0;
    if (number != detections.number) {
        const bool follows = number > 0 && number - 1 == detections.number;
        detections.previous = follows ? detections.current : std::uint16_t{0};
        detections.current = 0;
        detections.number = number;
    }
    detections.current = static_cast<std::uint16_t>(std::min(detections.current + 1, kMost));
    return detections;
}

int count_detections(Detections detections, std::int32_t now, int history) {
    if (history == 0) return detections.current;
    // The sliding history still covers the last history - 1 - now % history positions of the
    // previous window.
    const std::int64_t covered = history - 1 - now % history;
    return detections.current + static_cast<int>(detections.previous * covered / history);
}

int freeze_steps(int detections, float rate) {
    constexpr float kMost = 1e9f;  // A position plus steps fits into 32 bits.
    return static_cast<int>(std::min(std::sqrt(static_cast<float>(detections)) / rate, kMost));
}

}  // namespace entropykv
