// Moves entries between a KV head and its cold storage, and decides by the freeze schedule which
// entries these are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "store/store_common.hpp"

namespace entropykv {

// Freezes and restores entries. Freezing an entry gives it a record, which it keeps when it is
// restored.
class Freezer {
public:
    explicit Freezer(StoreCommon& common) : common_(common) {}

    // Puts entry i (stored or staged, at `slot`) into cold storage; the caller must then drop it
    // from the head, or overwrite its slot. due: see ColdRecord. Returns the number of the page of
    // records that was dropped to make room, or kNone.
    int freeze(Head& head, int i, const Slot& slot, std::int32_t now, std::int32_t due,
               Detections detections) const noexcept;
    // Freezes all stored and staged entries that a mask does not mark, without a time to restore
    // them; the caller must then drop them from the head.
    void freeze_unmarked(Head& head, const StagedEntries& staged, std::int32_t now,
                         const std::uint8_t* mask) const noexcept;

    // Notes that entry i, whose K and V are in place, was restored from a record.
    void note_restored(Head& head, int i, const ColdRecord& record, int record_number,
                       std::int32_t now) const noexcept;
    // Restores frozen records. `wants` selects pages and records; place() returns the number of the
    // entry that the next one becomes, or kNone to stop. Returns how many were restored. buffer:
    // has room for a page of storage.
    template <typename Wants, typename Place>
    int restore(Head& head, std::int32_t now, std::byte* buffer, Wants wants,
                Place place) const noexcept;
    // Restores the frozen records that `wants` selects, and appends them to the head while its
    // budget and its pages have room. Returns how many were restored.
    template <typename Wants>
    int append(Head& head, std::int32_t now, std::byte* buffer, Wants wants) const noexcept;

private:
    StoreCommon& common_;
};

template <typename Wants, typename Place>
int Freezer::restore(Head& head, std::int32_t now, std::byte* buffer, Wants wants,
                     Place place) const noexcept {
    ColdHead& cold = *head.frozen.cold;
    const int per_page = head.layout().entries;
    int n = 0;
    for (int page = 0; page < cold.n_pages(); ++page) {
        if (cold.n_frozen(page) == 0 || !wants.of_page(cold, page)) continue;
        const std::byte* rows = nullptr;
        for (int slot = 0; slot < per_page; ++slot) {
            if (!wants.of_record(cold, page, slot)) continue;
            const int i = page * per_page + slot;
            if (rows == nullptr) rows = cold.read(page, buffer);
            if (rows == nullptr) break;
            const int target = place();
            if (target == ColdHead::kNone) return n;
            const Slot to = head.place(target);
            cold.take(rows, i, *common_.kernels, to.page, to.index);
            note_restored(head, target, cold.record(i), i, now);
            cold.restore(i);
            ++n;
        }
    }
    return n;
}

template <typename Wants>
int Freezer::append(Head& head, std::int32_t now, std::byte* buffer, Wants wants) const noexcept {
    const int room = head.room();
    return restore(head, now, buffer, wants,
                   [&] { return head.count() < room ? head.add_place() : ColdHead::kNone; });
}

// Applies the freeze schedule (FreezeSchedule): entries that get little attention in a step are
// frozen for some steps, and restored when their time is over.
class Schedule {
public:
    explicit Schedule(StoreCommon& common) : common_(common), freezer_(common) {}

    // Counts the stored entries that got little attention as detected, and freezes those that the
    // schedule freezes for a step or more. Entries that are due take their places, but leave room
    // for the staged entries, of which there are as many as queries. mask: has room for the head's
    // entries; buffer: for a page of storage.
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
