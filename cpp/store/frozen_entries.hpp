// Says which entries of a KV head are frozen, and which of the entries that it holds were frozen
// before and have a record.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "cold/cold_head.hpp"

namespace entropykv {

struct FrozenEntries {
    std::optional<ColdHead> cold{};
    bool counts_detections = false;        // true under a freeze schedule
    std::vector<int> record_numbers{};     // number of the record of each held entry, or kNone
    std::vector<Detections> detections{};  // of each held entry, under a schedule
    // The counters are of this head only: a shared counter would make the threads wait for each
    // other.
    std::size_t n_frozen = 0;
    std::size_t n_restored = 0;
    std::size_t n_recalled = 0;

    explicit operator bool() const { return cold.has_value(); }
    int n_now() const { return cold ? cold->n_frozen() : 0; }

    // Calls visit(position) for every frozen entry, in no particular order.
    template <typename Visit>
    void for_each_frozen(Visit visit) const {
        for (int i = 0; cold && i < cold->n_records(); ++i)
            if (cold->frozen(i)) visit(cold->position(i));
    }
    // Makes room for n entries of the head.
    void size(std::size_t n) {
        if (!cold) return;
        if (record_numbers.size() < n) record_numbers.resize(n, ColdHead::kNone);
        if (counts_detections && detections.size() < n) detections.resize(n);
    }
    // begin() notes a new entry i; move() notes that an entry took the place of another one.
    void begin(int i) {
        if (!cold) return;
        record_numbers[index(i)] = ColdHead::kNone;
        if (counts_detections) detections[index(i)] = Detections{};
    }
    void move(int from, int to) {
        if (!cold) return;
        record_numbers[index(to)] = record_numbers[index(from)];
        if (counts_detections) detections[index(to)] = detections[index(from)];
    }
    // Returns how often entry i of the `count` held ones was detected; staged entries never were.
    Detections detections_of(int i, int count) const {
        return i < count && counts_detections ? detections[index(i)] : Detections{};
    }
    // After a page of records was dropped, clears the record numbers of the first n entries that
    // point into it.
    void forget_page(int dropped, int n, const PageLayout& layout) {
        for (int i = 0; i < n; ++i)
            if (in_page(record_numbers[index(i)], dropped, layout))
                record_numbers[index(i)] = ColdHead::kNone;
    }
    static bool in_page(int record_number, int page, const PageLayout& layout) {
        return page != ColdHead::kNone && record_number != ColdHead::kNone &&
               layout.page_of(record_number) == page;
    }

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
};

}  // namespace entropykv
