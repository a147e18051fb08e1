// The pages that hold the entries of one KV head. A page can have several owners: a checkpoint
// shares the pages of a store, and so does a store that continues from the checkpoint. No owner
// writes to a shared page; it makes a copy first, between micro-batches and never inside the
// attention op. A page whose other owners have left belongs to the last one without a copy, at any
// time. The importance of entries changes in every micro-batch, so every store keeps it outside of
// shared pages. Pages of a mapped file are marked as shared, too: other processes may have them,
// and the system copies a page that is written to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "page/page_layout.hpp"
#include "store/store_pool.hpp"

namespace entropykv {

class HeadPages {
public:
    HeadPages(const PageLayout& layout, PageShare& share) : layout_(&layout), share_(&share) {}

    std::size_t size() const { return pages_.size(); }
    std::byte* operator[](int number) const { return pages_[index(number)]; }
    const std::vector<std::byte*>& all() const { return pages_; }
    // Returns how many entries fit.
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

    // Marks all pages as shared.
    void share_all();
    // Make one page, or all pages from `first` on, belong to this head only, by copying those that
    // still have other owners.
    void own(int number);
    void own_from(std::size_t first);
    // Returns how many of the pages [first, last) would have to be copied.
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

}  // namespace entropykv
