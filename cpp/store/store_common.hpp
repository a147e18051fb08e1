// Holds what all components of a store use: its settings, the current micro-batch, and counters.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/kernels.hpp"
#include "store/head.hpp"
#include "store/store_settings.hpp"

namespace entropykv {

struct StoreCommon {
    explicit StoreCommon(const StoreSettings& asked) : settings(asked) {}

    StoreSettings settings;
    const KernelTable* kernels = &kKernelsPortable;
    std::optional<FreezeSchedule> schedule{};  // unset while no schedule is followed
    std::vector<int> knots{};                  // kept entries for which losses are measured
    std::int32_t newest = 0;                   // the last position of the micro-batch
    bool single_query = false;                 // whether the micro-batch has one query
    std::atomic<std::size_t> evicted{0};
    std::atomic<std::int32_t> whole_from{0};  // see HeadStore::windows_whole_from()
    std::atomic<std::int64_t> eviction_nanoseconds{0};
    std::atomic<std::int64_t> cold_nanoseconds{0};

    const ImportanceSettings& importance() const { return settings.importance; }
    const Measure& measure() const { return settings.importance.measure(); }
    bool predicts() const { return importance().predicts(); }
    bool measures_losses() const { return !knots.empty(); }
    // Under a schedule, the queries of all tokens count.
    int scoring_interval() const { return schedule ? 1 : kScoringInterval; }
    int neighbourhood() const { return schedule ? 0 : kNeighbourhood; }
    // Returns what a head must keep for the queries after position `newest_seen`.
    Protection protection_of(const Head& head, std::int32_t newest_seen) const {
        Protection protection =
            settings.own_windows ? settings.protection.within(head.budget()) : settings.protection;
        protection.oldest = head.shape().oldest_seen(newest_seen + 1);
        return protection;
    }
    // Notes that an entry was dropped because it left the window of its layer.
    void note_left_window(const LayerShape& shape, std::int32_t position) noexcept {
        const std::int32_t from = shape.first_blind(position);
        std::int32_t known = whole_from.load(std::memory_order_relaxed);
        while (known < from &&
               !whole_from.compare_exchange_weak(known, from, std::memory_order_relaxed)) {
        }
    }
};

}  // namespace entropykv
