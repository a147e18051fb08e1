#include "store/freezer.hpp"

namespace entropykv {

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

}  // namespace entropykv
