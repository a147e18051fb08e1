// The schedule of freezing: what the queries of a step find little in is frozen for a while, and
// comes back when its time is over. See FreezeSchedule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "store/freezer.hpp"

namespace entropykv {

class Schedule {
public:
    explicit Schedule(StoreCommon& common) : common_(common), freezer_(common) {}

    // Counts the stored entries that the queries found little in, and freezes them for a while.
    // Those that are due take their places, as far as the staged entries, as many as the queries,
    // leave room. mask: of the head's entries; buffer: a page of storage.
    void follow(Head& head, int n_queries, const float* observed, std::uint8_t* mask,
                std::byte* buffer) const noexcept;
    // Restores what is due, as far as there is room.
    void restore_due(Head& head, std::byte* buffer) const noexcept;

private:
    bool can_freeze(std::int32_t position) const {
        return position >= common_.settings.protection.n_sinks &&
               position <= common_.newest - common_.schedule->window;
    }
    float limit(const Head& head, int n_queries) const noexcept;
    int freeze_little(Head& head, float limit, const float* observed,
                      std::uint8_t* mask) const noexcept;

    StoreCommon& common_;
    Freezer freezer_;
};

}  // namespace entropykv
