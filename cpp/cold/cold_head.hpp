// The frozen entries of one KV head. An entry that is frozen gets a record, and its K and V are
// written once: where it is restored, the record stays, so that freezing it again moves nothing.
// Records lie in pages; the last one is open, and is written to storage when it is full. Every full
// page has a sketch of its keys, which queries are compared with: see key_sketch.hpp. (A page's
// bounds of q.k, as in Quest, Tang et al. 2024, arXiv:2406.10774, or the means of clusters of its
// keys promise too much: nearly every page would have to be read.)
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cold/cold_codec.hpp"
#include "cold/cold_records.hpp"
#include "cold/cold_storage.hpp"
#include "kernels/kernels.hpp"
#include "platform/aligned_bytes.hpp"

namespace entropykv {

// What all heads of a layer share.
struct ColdLayout {
    ColdLayout(ColdType type, const PageLayout& page);
    PageLayout page;
    KeySketch sketch;
    ColdCodec codec;
};

// Queries of a micro-batch, all of one KV head, scaled; rows are padded to the stride of its keys.
struct QueryRows {
    const float* data;
    int n;
    int stride;
    float softcap;
    const std::int32_t* positions;
    const float* slopes;  // what a logit falls by per position of distance (ALiBi), or null
    const float* row(int r) const {
        return data + static_cast<std::size_t>(r) * static_cast<std::size_t>(stride);
    }
    bool adjusts() const { return softcap > 0.0f || slopes != nullptr; }
    // The logit of query r and an entry at a position, of their product.
    float adjusted(int r, float product, std::int32_t position) const {
        const float logit = softcap > 0.0f ? softcap * std::tanh(product / softcap) : product;
        if (slopes == nullptr) return logit;
        return logit + slopes[r] * static_cast<float>(position - positions[r]);
    }
};

class ColdHead {
public:
    static constexpr int kNone = -1;

    // most_pages: of storage; 0: no limit.
    ColdHead(const ColdLayout& layout, ColdStorage& storage, std::size_t most_pages);

    // Before add() is called up to n_new times: nothing of it allocates. Throws what
    // ColdStorage::take() throws, and nothing has changed.
    void prepare(int n_new);

    // Takes in an entry that has no record, frozen; returns the record. Where the limit is reached,
    // the page that is worth least is dropped first: see dropped_page().
    int add(const std::byte* page, int slot, const ColdRecord& record, float decay,
            const KernelTable& kernels) noexcept;
    void freeze(int record, float importance, std::int32_t now, std::int32_t due,
                Detections detections) noexcept;
    void restore(int record) noexcept;

    // K and V of a page of records as take() takes them, in place or in `buffer` (a page of
    // storage); null where storage failed.
    const std::byte* read(int page, std::byte* buffer) const noexcept;
    // K and V of a record whose page was read, to a slot of a page of the store.
    void take(const std::byte* rows, int record, const KernelTable& kernels, std::byte* page,
              int slot) const noexcept;

    // Asks for K and V of what is due, where it is in memory, and for what freeze() changes: a step
    // that freezes and restores many entries then waits for few of them.
    void ask_for_due(std::int32_t now) const noexcept;

    // q.k of all slots of a page, by its sketch; out [queries][per_page()]. Asks for what comes
    // next, too: page + 1.
    void products(const KernelTable& kernels, int page, const QueryRows& queries,
                  float* out) const noexcept;

    // Calls change(page, slot, position) for every entry that has a record, and writes it back.
    // buffer: as read()'s, and layout.page.bytes.
    template <typename Change>
    void rewrite(const KernelTable& kernels, std::byte* buffer, Change change);

    // All of it as bytes, for session files: see cold_state.cpp.
    std::size_t state_bytes() const;
    bool save(std::byte* state) const;  // false where storage failed
    static std::size_t empty_state_bytes();
    static void save_empty(std::byte* state);  // as without records
    // What is wrong with a state, or nothing; seen: by position, what the head holds, and then
    // what is frozen, too.
    std::string state_problem(const std::byte* state, std::size_t size,
                              std::vector<bool>& seen) const;
    // Whether a record of a state without problems is that of an active entry at the position.
    static bool is_home(const std::byte* state, int record, int per_page, std::int32_t position);
    // Room for load(), and for n_new calls of add() after it.
    void begin_load(const std::byte* state, int n_new);
    // Returns how many frozen entries the limit dropped: their records are dead.
    int load(const std::byte* state, const KernelTable& kernels, std::byte* buffer);

    // Forgets records at positions >= from; timers end as if time had gone back to it.
    void truncate(std::int32_t from);
    void clear_detections();

    // Whether a page that was read stays where it is while entries are added.
    bool stays(int page) const { return page != open_ && !is_limited() && storage_->in_place(); }

    // Whether pages of records are dropped where storage has no more room.
    bool is_limited() const { return most_pages_ != 0; }

    int n_frozen() const { return n_frozen_; }
    int n_frozen(int page) const { return pages_[index(page)].n_frozen; }
    int n_pages() const { return static_cast<int>(pages_.size()); }
    int open_page() const { return open_; }
    int n_records() const { return static_cast<int>(records_.size()); }
    ColdRecord record(int i) const { return records_.get(index(i)); }
    bool frozen(int i) const { return records_.frozen_at[index(i)] != kActive; }
    std::int32_t position(int i) const { return records_.positions[index(i)]; }
    // Whether it is frozen since before `now`, and its timer has ended.
    bool due(int i, std::int32_t now) const {
        return records_.dues[index(i)] <= now && records_.frozen_at[index(i)] < now;
    }
    int per_page() const { return layout_->page.entries; }
    // Page of records that the last add() dropped, or kNone.
    int dropped_page() const { return dropped_page_; }
    int n_dropped() const { return n_dropped_; }
    // Frozen entries that are due at `now`.
    int count_due(std::int32_t now) const;
    std::size_t stored_pages() const { return n_stored_; }
    std::size_t sketch_bytes() const { return n_stored_ * layout_->sketch.page_bytes(); }

private:
    static constexpr int kSketchesOfSlab = 16;
    struct Page {
        std::uint32_t place = 0;  // in storage, once full
        int n_records = 0;        // those that are alive
        int n_frozen = 0;
        bool stored = false;
    };

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    Page& page_of(int record) { return pages_[index(layout_->page.page_of(record))]; }
    void open_next() noexcept;
    void close_open(const KernelTable& kernels) noexcept;
    void pack(int page, std::byte* rows, const KernelTable& kernels) noexcept;
    void store(int page, const std::byte* packed) noexcept;
    void count_records(int page);
    std::byte* sketch_of(int page) {
        return sketches_[index(page / kSketchesOfSlab)].data() +
               index(page % kSketchesOfSlab) * layout_->sketch.page_bytes();
    }
    const std::byte* sketch_of(int page) const {
        return const_cast<ColdHead*>(this)->sketch_of(page);
    }
    int least_page(float decay, std::int32_t now) const noexcept;
    void drop_page(int page) noexcept;
    void free_page(int page);

    const ColdLayout* layout_;
    ColdStorage* storage_;
    std::size_t most_pages_;
    ColdRecords records_;
    std::vector<Page> pages_;
    std::vector<int> free_pages_;         // page numbers to use again
    std::vector<std::uint32_t> spare_;    // taken from storage, not in use
    AlignedBytes open_rows_;              // of the open page
    AlignedBytes packed_;                 // it, as storage takes it
    std::vector<AlignedBytes> sketches_;  // of kSketchesOfSlab pages each
    std::vector<float> keys_;             // [kGroupEntries][k_dim], of what is sketched
    int open_ = kNone;
    int n_open_ = 0;  // entries of the open page
    int n_frozen_ = 0;
    int dropped_page_ = kNone;
    int n_dropped_ = 0;
    std::size_t n_stored_ = 0;
};

template <typename Change>
void ColdHead::rewrite(const KernelTable& kernels, std::byte* buffer, Change change) {
    for (int page = 0; page < n_pages(); ++page) {
        const bool open = page == open_;
        if (!open && !pages_[index(page)].stored) continue;
        std::byte* rows = open_rows_.data();
        if (!open) {
            const std::byte* packed = read(page, buffer);
            if (packed == nullptr) continue;
            rows = buffer + storage_->page_bytes();
            layout_->codec.unpack(packed, kernels, rows);
        }
        for (int slot = 0; slot < (open ? n_open_ : per_page()); ++slot) {
            const std::int32_t at = position(page * per_page() + slot);
            if (at != kDead) change(rows, slot, at);
        }
        if (open) continue;
        pack(page, rows, kernels);
        storage_->write(pages_[index(page)].place, packed_.data());
    }
}

}  // namespace entropykv
