#include "freezing.hpp"

#include <algorithm>
#include <cmath>

namespace entropykv {

int detect(Detections& detections, std::int32_t now, int history) {
    constexpr int kMost = 65535;
    const std::int32_t number = history > 0 ? now / history : 0;
    if (number != detections.number) {
        const bool follows = number == detections.number + 1;
        detections.previous = follows ? detections.current : std::uint16_t{0};
        detections.current = 0;
        detections.number = number;
    }
    detections.current = static_cast<std::uint16_t>(std::min(detections.current + 1, kMost));
    if (history == 0) return detections.current;
    // Of the window before, the last (history - 1 - elapsed) positions are still within reach.
    const int elapsed = now % history;
    return detections.current + detections.previous * (history - 1 - elapsed) / history;
}

int freeze_steps(int detections, float rate) {
    return static_cast<int>(std::sqrt(static_cast<float>(detections)) / rate);
}

}  // namespace entropykv
