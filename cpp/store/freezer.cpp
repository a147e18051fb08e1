#include "store/freezer.hpp"

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

int Freezer::freeze(Head& head, int i, const Slot& slot, std::int32_t now, std::int32_t due,
                    Detections detections) const noexcept {
    const auto number = static_cast<std::size_t>(i);
    const bool stored = i < head.count();
    const PageLayout& layout = head.layout();
    const float importance = stored ? head.importance(i) : layout.importance(slot.page)[slot.index];
    FrozenEntries& frozen = head.frozen;
    ++frozen.n_frozen;
    if (stored && frozen.record_numbers[number] != ColdHead::kNone) {
        frozen.cold->freeze(frozen.record_numbers[number], importance, now, due, detections);
        return ColdHead::kNone;
    }
    const std::int32_t position = layout.positions(slot.page)[slot.index];
    frozen.cold->add(slot.page, slot.index, {position, importance, now, due, detections},
                     common_.importance(), *common_.kernels);
    const int dropped = frozen.cold->dropped_page();
    if (dropped == ColdHead::kNone) return dropped;
    common_.evicted.fetch_add(static_cast<std::size_t>(frozen.cold->n_dropped()),
                              std::memory_order_relaxed);
    frozen.forget_page(dropped, head.count(), layout);
    return dropped;
}

void Freezer::freeze_unmarked(Head& head, const StagedEntries& staged, std::int32_t now,
                              const std::uint8_t* mask) const noexcept {
    for (int i = 0; i < head.count() + staged.count; ++i) {
        if (mask[i] != 0) continue;
        freeze(head, i, head.place(i, staged), now, kNever,
               head.frozen.detections_of(i, head.count()));
    }
}

void Freezer::note_restored(Head& head, int i, const ColdRecord& record, int record_number,
                            std::int32_t now) const noexcept {
    const PageLayout& layout = head.layout();
    const Slot target = head.place(i);
    layout.positions(target.page)[target.index] = record.position;
    layout.importance(target.page)[target.index] = common_.importance().decayed(
        record.importance, decay_factor(common_.importance().decay, now - record.frozen_at));
    FrozenEntries& frozen = head.frozen;
    frozen.record_numbers[static_cast<std::size_t>(i)] = record_number;
    if (frozen.counts_detections)
        frozen.detections[static_cast<std::size_t>(i)] = record.detections;
    ++frozen.n_restored;
}

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

// Freezes the detected entries that the schedule freezes for a step or more, and marks the others
// in `mask`; returns how many were frozen.
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
