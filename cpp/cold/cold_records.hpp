// Holds what is known of frozen entries besides K and V. Records are allocated in blocks of whole
// pages, so that growing copies nothing and leaves little memory unused. In a block, each field is
// an array of its own, since every step scans some of the fields.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/freezing.hpp"
#include "page/page_layout.hpp"

namespace entropykv {

constexpr std::int32_t kActive = -1;  // frozen_at of a restored entry
constexpr std::int32_t kDead = -1;    // position of a free record
constexpr std::int32_t kNever = INT32_MAX;

struct ColdRecord {
    std::int32_t position = kDead;
    float importance = 0.0f;           // its importance when it was frozen
    std::int32_t frozen_at = kActive;  // the newest position at that time
    std::int32_t due = kNever;         // restored once the newest position is greater
    Detections detections{};

    bool frozen() const { return frozen_at != kActive; }
};

class ColdRecords {
public:
    // timed: entries have timers and detections, as a schedule needs. Otherwise every record is due
    // at kNever, and was never detected.
    ColdRecords(const PageLayout& layout, bool timed);

    bool timed() const { return timed_; }
    int n_pages() const { return n_pages_; }
    int size() const { return n_pages_ * per_page_; }
    std::size_t bytes() const;  // bytes of heap memory

    // Makes room for n_pages pages. Throws std::bad_alloc.
    void reserve(std::size_t n_pages);
    // Changes the number of pages, for which there must be room; new records are free.
    void resize(int n_pages) noexcept;

    ColdRecord get(int i) const noexcept;
    void set(int i, const ColdRecord& record) noexcept;
    // Tells whether a record was frozen before `now` and its time is over.
    bool due(int page, int slot, std::int32_t now) const {
        return timed_ && dues(page)[slot] <= now && frozen_at(page)[slot] < now;
    }
    // Count the records whose time is over at `now`: all of them, or those of a page.
    int count_due(std::int32_t now) const noexcept;
    int count_due(int page, std::int32_t now) const noexcept;
    // Prefetches what freezing changes.
    void prefetch_all() const noexcept;

    // Return the fields of a page's records.
    std::int32_t* positions(int page) { return values<std::int32_t>(page, 0); }
    float* importance(int page) { return values<float>(page, 1); }
    std::int32_t* frozen_at(int page) { return values<std::int32_t>(page, 2); }
    const std::int32_t* positions(int page) const { return values<std::int32_t>(page, 0); }
    const float* importance(int page) const { return values<float>(page, 1); }
    const std::int32_t* frozen_at(int page) const { return values<std::int32_t>(page, 2); }
    // These fields exist only if records are timed.
    std::int32_t* dues(int page) { return values<std::int32_t>(page, 3); }
    Detections* detections(int page) { return values<Detections>(page, 4); }
    const std::int32_t* dues(int page) const { return values<std::int32_t>(page, 3); }
    const Detections* detections(int page) const { return values<Detections>(page, 4); }

private:
    static constexpr int kPagesOfBlock = 16;

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    template <typename T>
    T* values(int page, int column) const {
        const auto number = static_cast<unsigned>(page);
        const std::byte* block = blocks_[number / kPagesOfBlock].data();
        const std::byte* at = block + index(column) * column_bytes_ +
                              number % kPagesOfBlock * index(per_page_) * sizeof(T);
        return reinterpret_cast<T*>(const_cast<std::byte*>(at));
    }

    const PageLayout* layout_;
    int per_page_;
    bool timed_;
    // Counts the bytes of a 32-bit field of all records in a block; detections take two such
    // columns.
    std::size_t column_bytes_;
    int n_pages_ = 0;
    std::vector<std::vector<std::byte>> blocks_{};
};

}  // namespace entropykv
