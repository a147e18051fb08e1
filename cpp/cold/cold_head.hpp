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

#include "cold/cold_book.hpp"
#include "cold/cold_codec.hpp"
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

class ColdHead : public ColdBook {
public:
    // most_pages: of storage; 0: no limit. timed: see ColdRecords.
    ColdHead(const ColdLayout& layout, ColdStorage& storage, std::size_t most_pages, bool timed);

    // Before add() is called up to n_new times: nothing of it allocates. Throws what
    // ColdStorage::take() throws, and nothing has changed.
    void prepare(int n_new);

    // Takes in an entry that has no record, frozen; returns the record. Where the limit is reached,
    // the page that is worth least is dropped first: see dropped_page().
    int add(const std::byte* page, int slot, const ColdRecord& record,
            const ImportanceSettings& settings, const KernelTable& kernels) noexcept;

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

    // Forgets records at positions >= from; timers end as if time had gone back to it.
    void truncate(std::int32_t from);
    // Whether a page that was read stays where it is while entries are added.
    bool stays(int page) const { return page != open_ && !is_limited() && storage_->in_place(); }

    // Whether pages of records are dropped where storage has no more room.
    bool is_limited() const { return most_pages_ != 0; }

    // Page of records that the last add() dropped, or kNone.
    int dropped_page() const { return dropped_page_; }
    int n_dropped() const { return n_dropped_; }
    // What sketches take of the heap, those that will be drawn next, too; and all that is neither
    // sketches nor entries: records, lists, and what pages are packed with.
    std::size_t sketch_bytes() const;
    std::size_t overhead_bytes() const;

private:
    friend class ColdLoader;
    friend class ColdSaver;
    static constexpr int kSketchesOfSlab = 4;

    void close_open(const KernelTable& kernels) noexcept;
    void pack(int page, std::byte* rows, const KernelTable& kernels) noexcept;
    void store(int page, const std::byte* packed) noexcept;
    std::byte* sketch_of(int page) {
        return sketches_[index(page / kSketchesOfSlab)].data() +
               index(page % kSketchesOfSlab) * cold_->sketch.page_bytes();
    }
    const std::byte* sketch_of(int page) const {
        return const_cast<ColdHead*>(this)->sketch_of(page);
    }
    void drop_page(int page) noexcept;
    void release_page(int page);

    const ColdLayout* cold_;
    ColdStorage* storage_;
    std::size_t most_pages_;
    std::vector<std::uint32_t> spare_;    // taken from storage, not in use
    AlignedBytes open_rows_;              // of the open page
    AlignedBytes packed_;                 // it, as storage takes it
    std::vector<AlignedBytes> sketches_;  // of kSketchesOfSlab pages each
    std::vector<float> keys_;             // [kGroupEntries][k_dim], of what is sketched
    int dropped_page_ = kNone;
    int n_dropped_ = 0;
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
            cold_->codec.unpack(packed, kernels, rows);
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
