// Holds the entries of one KV head in pages. Entries are in no order; each knows its position. The
// entries of a micro-batch are staged until they are appended, or until an eviction selects which
// of all entries stay.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cold/cold_head.hpp"
#include "decide/dropped_scores.hpp"
#include "kernels/kernels.hpp"
#include "page/page_layout.hpp"
#include "store/layer_shape.hpp"
#include "store/store_pool.hpp"
#include "store/undo_log.hpp"

namespace entropykv {

struct Slot {
    std::byte* page;
    int index;
};

// Refers to the staged entries of one head, in the layout of the pool's pages.
struct StagedEntries {
    std::byte* const* pages = nullptr;
    int count = 0;
    std::int32_t newest = 0;  // the last position of the micro-batch, or of a draft token
};

// Holds the pages of the entries of one KV head. A page can have several owners: a checkpoint
// shares the pages of a store, and so does a store that continues from the checkpoint. No owner
// writes to a shared page; it makes a copy first, between micro-batches and never inside the
// attention op. A page whose other owners have left belongs to the last one without a copy, at any
// time. The importance of entries changes in every micro-batch, so every store keeps it outside of
// shared pages. Pages of a mapped file are marked as shared, too: other processes may have them,
// and the system copies a page that is written to.
class HeadPages {
public:
    HeadPages(const PageLayout& layout, PageShare& share) : layout_(&layout), share_(&share) {}

    std::size_t size() const { return pages_.size(); }
    std::byte* operator[](int number) const { return pages_[index(number)]; }
    const std::vector<std::byte*>& all() const { return pages_; }
    int room() const { return static_cast<int>(pages_.size()) * layout_->entries; }

    // grow() allocates pages until `entries` entries fit; drop() gives back the pages that
    // `entries` entries do not need.
    void grow(int entries);
    void drop(int entries);
    void reserve(int entries) { pages_.reserve(pages_of(entries)); }
    std::size_t pages_of(int entries) const;

    // Returns the importance of the entries of a page: the values in the page, or the head's own
    // copy if the page is shared.
    float* importance(int number) {
        return is_shared(number) ? importance_.data() + index(number * layout_->entries)
                                 : layout_->importance(pages_[index(number)]);
    }
    const float* importance(int number) const {
        return const_cast<HeadPages*>(this)->importance(number);
    }
    // Returns the head's own copies of the importance, by entry; empty if no page is shared.
    const std::vector<float>& copied_importance() const { return importance_; }
    bool any_shared() const { return n_shared_ > 0; }

    // Marks all pages as shared, and copies the importance of their entries.
    void share_all();
    // Make one page, or all pages from `first` on, belong to this head only, by copying those that
    // still have other owners.
    void own(int number);
    void own_from(std::size_t first);
    // Returns how many of the pages [first, last) must be copied before they are written to.
    std::size_t count_shared(std::size_t first, std::size_t last) const;

    // take_over() takes the pages of a checkpoint or of a mapped file, all of them shared; view()
    // takes pages that belong to no pool. make_room_to_share() allocates in advance what a head
    // needs whose pages, up to this many, are shared.
    void make_room_to_share(std::size_t pages);
    void take_over(std::vector<std::byte*> pages, std::vector<float> importance) noexcept;
    void view(std::vector<std::byte*> pages) { pages_ = std::move(pages); }
    // Replaces the address of every page by what visit(page) returns, after the pool has moved
    // pages.
    template <typename Visit>
    void move(Visit visit) {
        for (std::byte*& page : pages_) page = visit(page);
    }

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    bool is_shared(int number) const { return n_shared_ > 0 && shared_[index(number)] != 0; }
    void forget_if_alone() noexcept;

    const PageLayout* layout_;
    PageShare* share_;
    std::vector<std::byte*> pages_;
    // shared_ says of each page whether it may be shared, importance_ has the importance by entry;
    // both are empty if no page is shared.
    std::vector<std::uint8_t> shared_{};
    std::vector<float> importance_{};
    int n_shared_ = 0;
};

// Says which entries of a KV head are frozen, and which of the entries that it holds were frozen
// before and have a record.
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

class Head {
public:
    // The head refers to all three arguments, so they must not move.
    Head(const LayerShape& shape, const PageLayout& layout, PageShare& share)
        : pages(layout, share), shape_(&shape), layout_(&layout) {}

    const LayerShape& shape() const { return *shape_; }
    const PageLayout& layout() const { return *layout_; }
    int group() const { return shape_->n_head / shape_->n_head_kv; }  // query heads per KV head
    int count() const { return count_; }
    int budget() const { return budget_; }
    void set_budget(int entries) { budget_ = entries; }
    // Returns how many entries the head may hold now, by its budget and in its pages.
    int room() const { return std::min(budget_, pages.room()); }

    Slot place(int i) const { return {pages[layout_->page_of(i)], layout_->slot_of(i)}; }
    // Returns the slot of an entry; numbers of stored entries come before those of staged ones.
    Slot place(int i, const StagedEntries& staged) const {
        if (i < count_) return place(i);
        const int of_staged = i - count_;
        return {staged.pages[layout_->page_of(of_staged)], layout_->slot_of(of_staged)};
    }
    std::int32_t position(int i) const {
        const Slot slot = place(i);
        return layout_->positions(slot.page)[slot.index];
    }
    float importance(int i) const {
        return pages.importance(layout_->page_of(i))[layout_->slot_of(i)];
    }

    // Calls visit(page, number of entries, number of the first entry) for the pages of stored
    // entries, then for those of staged entries.
    template <typename Visit>
    void for_each_page(const StagedEntries& staged, Visit visit) const;
    // Returns the importance of the entries of a page that for_each_page() visits; `first` is the
    // number of its first entry.
    float* importance_of(std::byte* page, int first) {
        return first < count_ ? pages.importance(layout_->page_of(first))
                              : layout_->importance(page);
    }
    const float* importance_of(std::byte* page, int first) const {
        return const_cast<Head*>(this)->importance_of(page, first);
    }

    // Appends all staged entries. The head must have pages for them.
    void append(const StagedEntries& staged, const KernelTable& kernels) noexcept;
    // Keeps the stored and staged entries that a mask marks, and drops the others.
    void keep(const std::uint8_t* mask, const StagedEntries& staged,
              const KernelTable& kernels) noexcept;
    // Adds an empty slot behind the stored entries, for which there must be a page, and returns its
    // number.
    int add_place() { return count_++; }
    // Marks the entries before a position in `mask`, and clears the others.
    void mark_before(std::int32_t position, std::uint8_t* mask) const noexcept;

    // Returns the first page that a micro-batch may write to. If it evicts, it may write to any
    // page; otherwise only from the next free slot on.
    std::size_t first_written(int n_tokens) const;
    // Returns how many shared pages keep(mask) would write to.
    std::size_t count_shared_holes(const std::uint8_t* mask) const noexcept;
    void drop_empty_pages() { pages.drop(count_); }
    void size_frozen() { frozen.size(static_cast<std::size_t>(pages.room())); }
    // Starts with `count` entries, whose pages the head has received.
    void begin_with(int count) { count_ = count; }

    HeadPages pages;
    FrozenEntries frozen;
    std::optional<DroppedScores> dropped{};  // set if losses count dropped entries
    std::vector<float> losses;               // [knot] (see decide/budget.hpp), as measured last
    std::vector<float> held_losses;          // losses by knot, without entries dropped before
    int upcoming = 0;                        // most entries after the next micro-batch
    std::unique_ptr<UndoLog> undo{};         // set once draft tokens are read

private:
    Slot writable_place(int i) noexcept;

    const LayerShape* shape_;
    const PageLayout* layout_;
    int count_ = 0;
    int budget_ = 0;
};

template <typename Visit>
void Head::for_each_page(const StagedEntries& staged, Visit visit) const {
    const int per_page = layout_->entries;
    for (int first = 0; first < count_; first += per_page)
        visit(pages[first / per_page], std::min(per_page, count_ - first), first);
    for (int first = 0; first < staged.count; first += per_page)
        visit(staged.pages[first / per_page], std::min(per_page, staged.count - first),
              count_ + first);
}

// Copies K and V of entries between pages of one layer. The keys of a group of entries are
// interleaved, so moving one of them takes as long as moving all of them. Therefore copies from one
// group to another are collected and made together.
// The source pages must not change before flush(), which the destructor calls.
class EntryCopies {
public:
    EntryCopies(const PageLayout& layout, const KernelTable& kernels)
        : layout_(&layout), kernels_(&kernels) {}
    ~EntryCopies() { flush(); }
    EntryCopies(const EntryCopies&) = delete;
    EntryCopies& operator=(const EntryCopies&) = delete;

    // Copies V at once, and K at the next flush(). An entry whose K and V lie elsewhere is copied
    // at once.
    void add(const std::byte* from, int from_slot, std::byte* to, int to_slot) noexcept {
        if (layout_->elsewhere) return copy_reference(*layout_, from, from_slot, to, to_slot);
        copy_value(*layout_, from, from_slot, to, to_slot);
        const unsigned from_group = static_cast<unsigned>(from_slot) / kGroupEntries;
        const unsigned to_group = static_cast<unsigned>(to_slot) / kGroupEntries;
        if (from != from_ || from_group != from_group_ || to != to_ || to_group != to_group_) {
            flush();
            from_ = from;
            from_group_ = from_group;
            to_ = to;
            to_group_ = to_group;
        }
        moves_.from[moves_.n] = lane(from_slot);
        moves_.to[moves_.n++] = lane(to_slot);
    }

    void flush() noexcept {
        if (moves_.n > 0)
            kernels_->move_keys(*layout_, from_, static_cast<int>(from_group_), to_,
                                static_cast<int>(to_group_), moves_);
        moves_.n = 0;
    }

private:
    static std::uint8_t lane(int slot) {
        return static_cast<std::uint8_t>(static_cast<unsigned>(slot) % kGroupEntries);
    }

    const PageLayout* layout_;
    const KernelTable* kernels_;
    const std::byte* from_ = nullptr;
    std::byte* to_ = nullptr;
    unsigned from_group_ = 0;
    unsigned to_group_ = 0;
    LaneMoves moves_{};
};

// Holds entries as attention reads them, sorted by position.
struct StoredRows {
    std::vector<std::int32_t> positions;
    std::vector<float> importance;
    std::vector<float> k;  // [entries][k_dim]
    std::vector<float> v;  // [entries][v_dim]
};

StoredRows rows_of(const Head& head);
std::vector<std::int32_t> positions_of(const Head& head);  // sorted
std::vector<float> importance_of(const Head& head);        // in the order of positions_of()

}  // namespace entropykv
