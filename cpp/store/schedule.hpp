// Applies the freeze schedule: entries that get little attention in a step are frozen for some
// steps, and restored when their time is over. See FreezeSchedule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "store/freezer.hpp"

namespace entropykv {

class Schedule {
public:
    explicit Schedule(StoreCommon& common) : common_(common), freezer_(common) {}

    // Counts the stored entries that got little attention as detected, and freezes them. Entries
    // that are due replace them, but leave room for the staged entries, of which there are as many
    // as queries. mask: has room for the head's entries; buffer: for a page of storage.
    void follow(Head& head, int n_queries, const float* observed, std::uint8_t* mask,
                std::byte* buffer) const noexcept;
    // Restores entries that are due while there is room.
    void restore_due(Head& head, std::byte* buffer) const noexcept;

private:
    bool can_freeze(std::int32_t position) const {
        return position >= common_.settings.protection.n_sinks &&
               position <= common_.newest - common_.schedule->window;
    }
    float limit(const Head& head, int n_queries) const noexcept;
    int freeze_detected(Head& head, float limit, const float* observed,
                        std::uint8_t* mask) const noexcept;

    StoreCommon& common_;
    Freezer freezer_;
};

}  // namespace entropykv
