// Holds the records of a KV head's frozen entries, and the list of the pages in which they lie. One
// page is open, the others are full and in storage, or free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cold/cold_records.hpp"
#include "decide/importance.hpp"
#include "page/page_layout.hpp"

namespace entropykv {

class ColdIndex {
public:
    static constexpr int kNone = -1;

    // timed: see ColdRecords.
    ColdIndex(const PageLayout& layout, bool timed) : layout_(&layout), records_(layout, timed) {}

    int per_page() const { return layout_->entries; }
    int n_pages() const { return static_cast<int>(pages_.size()); }
    int open_page() const { return open_; }
    std::size_t stored_pages() const { return n_stored_; }
    int n_frozen() const { return n_frozen_; }
    int n_frozen(int page) const { return pages_[index(page)].n_frozen; }
    int n_records() const { return records_.size(); }

    ColdRecord record(int i) const { return records_.get(i); }
    bool frozen(int i) const {
        return records_.frozen_at(layout_->page_of(i))[layout_->slot_of(i)] != kActive;
    }
    std::int32_t position(int i) const {
        return records_.positions(layout_->page_of(i))[layout_->slot_of(i)];
    }
    const ColdRecords& records() const { return records_; }
    int count_due(std::int32_t now) const { return records_.count_due(now); }

    // freeze() freezes an entry that has a record; restore() marks it as restored, and its record
    // stays.
    void freeze(int record, float importance, std::int32_t now, std::int32_t due,
                Detections detections) noexcept;
    void restore(int record) noexcept;
    void clear_detections();

protected:
    friend class ColdLoader;
    friend class ColdSaver;
    struct Page {
        std::uint32_t place = 0;  // number of the page in storage, once full
        int n_records = 0;        // records in use
        int n_frozen = 0;
        bool stored = false;
    };

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    // Makes room for n_pages more pages.
    void reserve(std::size_t n_pages);
    bool is_open_full() const { return open_ == kNone || n_open_ == per_page(); }
    void open_next() noexcept;
    // Adds a record in the open page, and returns its number.
    int add_record(const ColdRecord& record) noexcept;
    // Returns the stored page whose frozen entries are worth least.
    int least_page(const ImportanceSettings& settings, std::int32_t now) const noexcept;
    // Drop the records of a page: all, or those at positions >= from. Timers end as if time had
    // gone back to `from`.
    void forget_records(int page) noexcept;
    void truncate_records(int page, std::int32_t from);
    // Marks a stored page as free.
    void free_page(int page);

    const PageLayout* layout_;
    ColdRecords records_;
    std::vector<Page> pages_{};
    std::vector<int> free_pages_{};  // page numbers to use again
    int open_ = kNone;
    int n_open_ = 0;  // entries in the open page
    int n_frozen_ = 0;
    std::size_t n_stored_ = 0;
};

}  // namespace entropykv
