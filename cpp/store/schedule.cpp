#include "store/schedule.hpp"

#include <algorithm>

namespace entropykv {
namespace {

struct IsDue {
    std::int32_t now;
    bool of_page(const ColdHead& cold, int page) const {
        return cold.records().count_due(page, now) > 0;
    }
    bool of_record(const ColdHead& cold, int page, int slot) const {
        return cold.records().due(page, slot, now);
    }
};

}  // namespace

// Returns how much must be observed of an entry so that it is not detected. Of many queries, only
// the last ones are observed.
float Schedule::limit(const Head& head, int n_queries) const noexcept {
    const int n_observed = std::min(n_queries, common_.importance().observation_window);
    const int of_query = head.group() * head.shape().readers;
    const auto rows = static_cast<float>(of_query * n_observed);
    const float threshold = common_.schedule->threshold;
    const float even = threshold / static_cast<float>(head.count());
    const auto detection_limit = common_.measure().detection_limit;
    return detection_limit == nullptr ? 0.0f : detection_limit({rows, even, threshold});
}

// Freezes the detected entries whose time is long enough, and marks the others in `mask`; returns
// how many were frozen.
int Schedule::freeze_detected(Head& head, float limit, const float* observed,
                              std::uint8_t* mask) const noexcept {
    const FreezeSchedule& schedule = *common_.schedule;
    const std::int32_t newest = common_.newest;
    int n_frozen = 0;
    head.for_each_page({}, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = head.layout().positions(page);
        for (int slot = 0; slot < n; ++slot) {
            const int i = first + slot;
            mask[i] = 1;
            if (observed[i] >= limit || !can_freeze(positions[slot])) continue;
            Detections& known = head.frozen.detections[static_cast<std::size_t>(i)];
            const Detections detections = detected(known, newest, schedule.history);
            const int steps =
                freeze_steps(count_detections(detections, newest, schedule.history), schedule.rate);
            if (steps == 0) {
                known = detections;
                continue;
            }
            freezer_.freeze(head, i, {page, slot}, newest, newest + steps, detections);
            mask[i] = 0;
            ++n_frozen;
        }
    });
    return n_frozen;
}

void Schedule::follow(Head& head, int n_queries, const float* observed, std::uint8_t* mask,
                      std::byte* buffer) const noexcept {
    head.frozen.cold->prefetch_due(common_.newest);
    const int n_frozen = freeze_detected(head, limit(head, n_queries), observed, mask);
    if (n_frozen == 0) return;
    int room = std::min(n_frozen, head.budget() - n_queries - (head.count() - n_frozen));
    int hole = 0;
    freezer_.restore(head, common_.newest, buffer, IsDue{common_.newest}, [&] {
        if (room-- <= 0) return ColdHead::kNone;
        while (mask[hole] != 0) ++hole;
        mask[hole] = 1;
        return hole;
    });
    head.keep(mask, {}, *common_.kernels);
}

void Schedule::restore_due(Head& head, std::byte* buffer) const noexcept {
    freezer_.append(head, common_.newest, buffer, IsDue{common_.newest});
}

}  // namespace entropykv
