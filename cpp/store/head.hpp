// The entries of one KV head, in pages, in no order: each knows its position. Entries of a
// micro-batch are staged until they are appended, or until it is chosen which of all stay.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "decide/dropped_scores.hpp"
#include "decide/query_statistics.hpp"
#include "kernels/kernels.hpp"
#include "store/frozen_entries.hpp"
#include "store/head_pages.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

struct Slot {
    std::byte* page;
    int index;
};

// The entries of a micro-batch of one head, in the layout of the pool's pages.
struct StagedEntries {
    std::byte* const* pages = nullptr;
    int count = 0;
};

class Head {
public:
    // Both must stay where they are.
    Head(const LayerShape& shape, const PageLayout& layout, PageShare& share)
        : pages(layout, share), shape_(&shape), layout_(&layout) {}

    const LayerShape& shape() const { return *shape_; }
    const PageLayout& layout() const { return *layout_; }
    int group() const { return shape_->n_head / shape_->n_head_kv; }  // query heads
    int count() const { return count_; }
    int budget() const { return budget_; }
    void set_budget(int entries) { budget_ = entries; }
    // How many entries it may hold now, at most.
    int room() const { return std::min(budget_, pages.room()); }

    Slot place(int i) const { return {pages[layout_->page_of(i)], layout_->slot_of(i)}; }
    // Of stored entries, then of staged ones.
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

    // Visits the pages of stored entries, then those of staged ones: page, how many entries of it
    // count, and how many came before.
    template <typename Visit>
    void over_pages(const StagedEntries& staged, Visit visit) const;
    // Importance of the entries of such a page, from entry `first` on.
    float* importance_of(std::byte* page, int first) {
        return first < count_ ? pages.importance(layout_->page_of(first))
                              : layout_->importance(page);
    }
    const float* importance_of(std::byte* page, int first) const {
        return const_cast<Head*>(this)->importance_of(page, first);
    }

    // All staged entries after the stored ones, for which there are pages.
    void append(const StagedEntries& staged, const KernelTable& kernels) noexcept;
    // Those of stored and staged entries that a mask marks.
    void keep(const std::uint8_t* mask, const StagedEntries& staged,
              const KernelTable& kernels) noexcept;
    // A place behind the stored entries, for which there is a page.
    int add_place() { return count_++; }
    // Marks the entries before a position.
    void mark_before(std::int32_t position, std::uint8_t* mask) const noexcept;

    // The first page that a micro-batch may write to: where something is evicted, any of them; else
    // the one that the next entry goes to.
    std::size_t first_written(int n_tokens) const;
    // How many pages that others own, too, keep(mask) would write to.
    std::size_t foreign_holes(const std::uint8_t* mask) const noexcept;
    // Pages that hold its entries, and no more.
    void drop_empty_pages() { pages.drop(count_); }
    void size_frozen() { frozen.size(static_cast<std::size_t>(pages.room())); }
    // It holds `count` entries in pages that it was given.
    void begin_with(int count) { count_ = count; }

    HeadPages pages;
    FrozenEntries frozen;
    QueryStatistics queries{};               // of its group, where scores need them
    const TurnsBack* turns = nullptr;        // of its layer's RoPE, for those
    std::optional<DroppedScores> dropped{};  // where they are counted
    std::vector<float> losses;               // of the last micro-batch that measured, by knot
    std::vector<float> held_losses;          // the same without what was dropped before
    int upcoming = 0;                        // entries that the next micro-batch can leave behind

private:
    const LayerShape* shape_;
    const PageLayout* layout_;
    int count_ = 0;
    int budget_ = 0;
};

template <typename Visit>
void Head::over_pages(const StagedEntries& staged, Visit visit) const {
    const int per_page = layout_->entries;
    for (int first = 0; first < count_; first += per_page)
        visit(pages[first / per_page], std::min(per_page, count_ - first), first);
    for (int first = 0; first < staged.count; first += per_page)
        visit(staged.pages[first / per_page], std::min(per_page, staged.count - first),
              count_ + first);
}

}  // namespace entropykv
