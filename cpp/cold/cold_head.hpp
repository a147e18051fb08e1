// Holds the frozen entries of one KV head. When an entry is frozen for the first time, it gets a
// record, and its K and V are written to storage. When it is restored, the record stays, so
// freezing it again moves no data. Records lie in pages. One page is open, and goes to storage once
// it is full. Every full page has a sketch of its keys, which queries are compared with: see
// key_sketch.hpp. (Bounds of q.k per page, as in Quest, Tang et al. 2024, arXiv:2406.10774, or
// means of clusters of keys select far too many pages: nearly every page would have to be read.)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cold/cold_codec.hpp"
#include "cold/cold_storage.hpp"
#include "decide/freezing.hpp"
#include "decide/importance.hpp"
#include "kernels/kernels.hpp"
#include "page/page_layout.hpp"
#include "platform/aligned_bytes.hpp"

namespace entropykv {

constexpr std::int32_t kActive = -1;  // frozen_at of a restored entry
constexpr std::int32_t kDead = -1;    // position of a free record
constexpr std::int32_t kNever = INT32_MAX;

struct ColdRecord {
    std::int32_t position = kDead;
    float importance = 0.0f;           // when it was frozen
    std::int32_t frozen_at = kActive;  // the newest position when it was frozen
    std::int32_t due = kNever;         // restored once the newest position is this
    Detections detections{};

    bool frozen() const { return frozen_at != kActive; }
};

// Holds what is known of frozen entries besides K and V. Records are allocated in blocks of whole
// pages, so that growing copies nothing and leaves little memory unused. In a block, each field is
// an array of its own, since every step scans some of the fields.
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
    // Prefetches the importance and the detections of all timed records, which freezing changes.
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

// Holds what the cold storage of all heads of a layer has in common.
struct ColdLayout {
    ColdLayout(ColdType type, const PageLayout& page);
    PageLayout page;
    KeySketch sketch;
    ColdCodec codec;
};

// Refers to the scaled queries of a micro-batch for one KV head; rows are padded to the stride of
// its keys.
struct QueryRows {
    const float* data;
    int n;
    int stride;
    float softcap;
    const std::int32_t* positions;
    const float* slopes;  // the slope of each row (ALiBi), or null
    const float* row(int r) const {
        return data + static_cast<std::size_t>(r) * static_cast<std::size_t>(stride);
    }
    bool adjusts() const { return softcap > 0.0f || slopes != nullptr; }
    // Returns the logit of query r with an entry at a position, given their dot product.
    float adjusted(int r, float product, std::int32_t position) const {
        const float logit = softcap > 0.0f ? softcap * std::tanh(product / softcap) : product;
        if (slopes == nullptr) return logit;
        return logit + slopes[r] * static_cast<float>(position - positions[r]);
    }
};

class ColdHead {
public:
    static constexpr int kNone = -1;

    // most_pages: how many pages may be in storage; 0: any number. timed: see ColdRecords.
    ColdHead(const ColdLayout& layout, ColdStorage& storage, std::size_t most_pages, bool timed);

    // Must be called before add() is called up to n_new times, so that add() allocates nothing.
    // Throws what ColdStorage::take() throws, and then changes no entry.
    void prepare(int n_new);

    // Adds an entry without a record, and returns the number of its new record. If the limit is
    // reached, the page whose entries are worth least is dropped first: see dropped_page().
    int add(const std::byte* page, int slot, const ColdRecord& record,
            const ImportanceSettings& settings, const KernelTable& kernels) noexcept;

    // Returns the packed K and V of a page of records, for take(): either in place, or in `buffer`,
    // which has room for a page of storage. Returns null if storage failed.
    const std::byte* read(int page, std::byte* buffer) const noexcept;
    // Copies K and V of one record, whose page was read, to a slot of a page of the store.
    void take(const std::byte* rows, int record, const KernelTable& kernels, std::byte* page,
              int slot) const noexcept;

    // Prefetches K and V of entries that are due, and the records that freeze() will change, so
    // that a step that moves many entries waits less for memory.
    void prefetch_due(std::int32_t now) const noexcept;

    // Estimates q.k for all slots of a page from its sketch; out is [queries][per_page()]. Also
    // prefetches the sketch of the next page.
    void products(const KernelTable& kernels, int page, const QueryRows& queries,
                  float* out) const noexcept;

    // Calls change(page, slot, position) for every entry that has a record and for which
    // changes(position) is true, and writes its page back; pages without such an entry are not
    // read, and unreadable ones are skipped. buffer: room for a page of storage and one of entries.
    template <typename Changes, typename Change>
    void rewrite(const KernelTable& kernels, std::byte* buffer, Changes changes, Change change);

    // Drops records at positions >= from. Entries that were frozen later than that count as frozen
    // at from - 1, for as many steps.
    void truncate(std::int32_t from);
    // Tells whether the data of a page that was read stays where it is while entries are added.
    bool stays(int page) const { return page != open_ && !is_limited() && storage_->in_place(); }

    // Tells whether pages of records are dropped when the limit of storage is reached.
    bool is_limited() const { return most_pages_ != 0; }

    // Return the page of records that the last add() dropped, or kNone, and its frozen entries.
    int dropped_page() const { return dropped_page_; }
    int n_dropped() const { return n_dropped_; }
    // sketch_bytes() counts the memory of sketches, including those allocated in advance.
    // overhead_bytes() counts all memory that is neither sketches nor entries: records, lists and
    // buffers.
    std::size_t sketch_bytes() const;
    std::size_t overhead_bytes() const;

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

private:
    friend class ColdLoader;
    friend class ColdSaver;
    static constexpr int kSketchesPerSlab = 4;
    struct Page {
        std::uint32_t place = 0;  // number of the page in storage, once full
        int n_records = 0;        // records in use
        int n_frozen = 0;
        bool stored = false;
    };

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    void reserve(std::size_t n_pages);
    bool is_open_full() const { return open_ == kNone || n_open_ == per_page(); }
    void open_next() noexcept;
    int add_record(const ColdRecord& record) noexcept;
    int least_page(const ImportanceSettings& settings, std::int32_t now) const noexcept;
    // Drop the records of a page: all, or those at positions >= from, as truncate() does.
    void forget_records(int page) noexcept;
    void truncate_records(int page, std::int32_t from);
    void free_page(int page);
    void close_open(const KernelTable& kernels) noexcept;
    void pack(int page, std::byte* rows, const KernelTable& kernels) noexcept;
    void store(int page, const std::byte* packed) noexcept;
    std::byte* sketch_of(int page) {
        return sketches_[index(page / kSketchesPerSlab)].data() +
               index(page % kSketchesPerSlab) * cold_->sketch.page_bytes();
    }
    const std::byte* sketch_of(int page) const {
        return const_cast<ColdHead*>(this)->sketch_of(page);
    }
    void drop_page(int page) noexcept;
    void release_page(int page);

    const PageLayout* layout_;
    ColdRecords records_;
    std::vector<Page> pages_{};
    std::vector<int> free_pages_{};  // page numbers to use again
    int open_ = kNone;
    int n_open_ = 0;  // entries in the open page
    int n_frozen_ = 0;
    std::size_t n_stored_ = 0;
    const ColdLayout* cold_;
    ColdStorage* storage_;
    std::size_t most_pages_;
    std::vector<std::uint32_t> spare_;    // taken from storage, not yet used
    AlignedBytes open_rows_;              // rows of the open page
    AlignedBytes packed_;                 // the packed form of one page
    std::vector<AlignedBytes> sketches_;  // each has sketches of kSketchesPerSlab pages
    std::vector<float> keys_;             // keys to be sketched, [kGroupEntries][k_dim]
    int dropped_page_ = kNone;
    int n_dropped_ = 0;
};

template <typename Changes, typename Change>
void ColdHead::rewrite(const KernelTable& kernels, std::byte* buffer, Changes changes,
                       Change change) {
    for (int page = 0; page < n_pages(); ++page) {
        const bool open = page == open_;
        if (!open && !pages_[index(page)].stored) continue;
        const std::int32_t* positions = records_.positions(page);
        const int n = open ? n_open_ : per_page();
        const auto is_changed = [&](std::int32_t at) { return at != kDead && changes(at); };
        if (std::none_of(positions, positions + n, is_changed)) continue;
        std::byte* rows = open_rows_.data();
        if (!open) {
            const std::byte* packed = read(page, buffer);
            if (packed == nullptr) continue;
            rows = buffer + storage_->page_bytes();
            cold_->codec.unpack(packed, kernels, rows);
        }
        for (int slot = 0; slot < n; ++slot)
            if (is_changed(positions[slot])) change(rows, slot, positions[slot]);
        if (open) continue;
        pack(page, rows, kernels);
        storage_->write(pages_[index(page)].place, packed_.data());
    }
}

}  // namespace entropykv
