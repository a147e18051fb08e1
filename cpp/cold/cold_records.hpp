// What is known of entries that were frozen, besides K and V. Records lie in blocks of whole pages,
// so that nothing is copied and little lies idle where they become more; in a block every value is
// side by side with those of the other records, since every step looks through some of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/freezing.hpp"
#include "page/page_layout.hpp"

namespace entropykv {

constexpr std::int32_t kActive = -1;  // frozen_at of an entry that is restored
constexpr std::int32_t kDead = -1;    // position of a record that is free
constexpr std::int32_t kNever = INT32_MAX;

struct ColdRecord {
    std::int32_t position = kDead;
    float importance = 0.0f;           // when it was frozen
    std::int32_t frozen_at = kActive;  // newest position then
    std::int32_t due = kNever;         // newest position after which it is restored
    Detections detections{};

    bool frozen() const { return frozen_at != kActive; }
};

class ColdRecords {
public:
    // timed: whether entries have timers and are counted, as a schedule has it; else every record
    // is due kNever, and was never detected.
    ColdRecords(const PageLayout& layout, bool timed);

    bool timed() const { return timed_; }
    int n_pages() const { return n_pages_; }
    int size() const { return n_pages_ * per_page_; }
    std::size_t bytes() const;  // of the heap

    // Room for so many pages. Throws std::bad_alloc.
    void reserve(std::size_t n_pages);
    // For which there is room; new records are free.
    void resize(int n_pages) noexcept;

    ColdRecord get(int i) const noexcept;
    void set(int i, const ColdRecord& record) noexcept;
    // Whether it is frozen since before `now`, and its timer has ended.
    bool due(int page, int slot, std::int32_t now) const {
        return timed_ && dues(page)[slot] <= now && frozen_at(page)[slot] < now;
    }
    // How many timers have ended, or end now: of all entries, or of those of a page.
    int count_due(std::int32_t now) const noexcept;
    int count_due(int page, std::int32_t now) const noexcept;
    // Asks for what freezing changes.
    void ask_for_all() const noexcept;

    // Of the records of a page.
    std::int32_t* positions(int page) { return values<std::int32_t>(page, 0); }
    float* importance(int page) { return values<float>(page, 1); }
    std::int32_t* frozen_at(int page) { return values<std::int32_t>(page, 2); }
    const std::int32_t* positions(int page) const { return values<std::int32_t>(page, 0); }
    const float* importance(int page) const { return values<float>(page, 1); }
    const std::int32_t* frozen_at(int page) const { return values<std::int32_t>(page, 2); }
    // Where they are timed.
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
    std::size_t column_bytes_;  // of a block's values of 32 bits; detections take two columns
    int n_pages_ = 0;
    std::vector<std::vector<std::byte>> blocks_{};
};

}  // namespace entropykv
