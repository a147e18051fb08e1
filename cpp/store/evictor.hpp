// Decides which stored and staged entries a head keeps, and applies the decision. If all fit the
// budget, all stay. Otherwise entries that have left the window of their layer go first, then those
// with the lowest scores.
#pragma once

#include <cstdint>

#include "store/freezer.hpp"
#include "store/scorer.hpp"

namespace entropykv {

class Evictor {
public:
    Evictor(StoreCommon& common, Scorer& scorer)
        : common_(common), freezer_(common), scorer_(scorer) {}

    // Stores the staged entries and evicts what exceeds the budget. output_squares: see
    // Scorer::measure_losses().
    void commit(Head& head, const StagedEntries& staged, float output_squares) noexcept;
    // Evicts down to the budget between micro-batches.
    void evict_to_budget(Head& head) noexcept;

private:
    void keep_highest_scored(Head& head, const StagedEntries& staged, int keep,
                             std::int32_t newest) noexcept;
    void count_dropped(Head& head, int total, int n_kept, const Protection& protection) noexcept;
    bool drop_outside_window(Head& head, const StagedEntries& staged) noexcept;
    bool drop_before(Head& head, const StagedEntries& staged, std::int32_t oldest) noexcept;

    StoreCommon& common_;
    Freezer freezer_;
    Scorer& scorer_;
};

}  // namespace entropykv
