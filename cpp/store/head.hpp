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

#include "decide/dropped_scores.hpp"
#include "kernels/kernels.hpp"
#include "store/frozen_entries.hpp"
#include "store/head_pages.hpp"
#include "store/layer_shape.hpp"
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
    // Returns how many entries the head may hold now.
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
    // Gives back the pages that hold no entry.
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
