// Decides what a head keeps of its stored and staged entries, and does it: all of them while its
// budget holds them, else what no window has left, else those that rank highest.
#pragma once

#include <cstdint>

#include "store/freezer.hpp"
#include "store/ranking.hpp"

namespace entropykv {

class Keeper {
public:
    Keeper(StoreCommon& common, Ranking& ranking)
        : common_(common), freezer_(common), ranking_(ranking) {}

    // Takes in the staged entries. output_squares: see Ranking::measure_losses().
    void take_in(Head& head, const StagedEntries& staged, float output_squares) noexcept;
    // Evicts down to the budget, between micro-batches.
    void keep_best(Head& head) noexcept;

private:
    void keep_scored(Head& head, const StagedEntries& staged, int keep,
                     std::int32_t newest) noexcept;
    void count_dropped(Head& head, int total, int n_kept, const Protection& protection) noexcept;
    bool leave_window(Head& head, const StagedEntries& staged) noexcept;
    bool keep_from(Head& head, const StagedEntries& staged, std::int32_t oldest) noexcept;

    StoreCommon& common_;
    Freezer freezer_;
    Ranking& ranking_;
};

}  // namespace entropykv
