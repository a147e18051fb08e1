// What a KV head has frozen, and which of the entries that it holds have a record of having been.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "cold/cold_head.hpp"

namespace entropykv {

struct FrozenEntries {
    std::optional<ColdHead> cold{};
    bool counts_detections = false;        // under a schedule
    std::vector<int> homes{};              // records of the head's entries, where they have one
    std::vector<Detections> detections{};  // of its entries, where they are counted
    // How often that happened. (Not counted by all heads together: their threads would wait for
    // each other with every entry.)
    std::size_t n_frozen = 0;
    std::size_t n_restored = 0;
    std::size_t n_recalled = 0;

    explicit operator bool() const { return cold.has_value(); }
    int n_now() const { return cold ? cold->n_frozen() : 0; }

    // visit(position) for every entry that is frozen, in no order.
    template <typename Visit>
    void over_frozen(Visit visit) const {
        for (int i = 0; cold && i < cold->n_records(); ++i)
            if (cold->frozen(i)) visit(cold->position(i));
    }
    // Room for so many entries of the head.
    void size(std::size_t n) {
        if (!cold) return;
        if (homes.size() < n) homes.resize(n, ColdHead::kNone);
        if (counts_detections && detections.size() < n) detections.resize(n);
    }
    // Entry i is a new one; or takes the place of another one.
    void begin(int i) {
        if (!cold) return;
        homes[index(i)] = ColdHead::kNone;
        if (counts_detections) detections[index(i)] = Detections{};
    }
    void move(int from, int to) {
        if (!cold) return;
        homes[index(to)] = homes[index(from)];
        if (counts_detections) detections[index(to)] = detections[index(from)];
    }
    // How often entry i of the `count` that the head holds was detected; never, where it is staged.
    Detections detections_of(int i, int count) const {
        return i < count && counts_detections ? detections[index(i)] : Detections{};
    }
    // Of the first n entries, those with a record in a page of records that was dropped have none.
    void forget_page(int dropped, int n, const PageLayout& layout) {
        for (int i = 0; i < n; ++i)
            if (in_page(homes[index(i)], dropped, layout)) homes[index(i)] = ColdHead::kNone;
    }
    static bool in_page(int home, int page, const PageLayout& layout) {
        return page != ColdHead::kNone && home != ColdHead::kNone && layout.page_of(home) == page;
    }

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
};

}  // namespace entropykv
