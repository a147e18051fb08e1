// The pages that hold the entries of one KV head. Others may own some of them, too: a checkpoint
// shares those of a store, and a store that goes on from one shares them with it. None of the
// owners writes to such a page: who has to, gets a copy before (outside of the attention op), and
// what every micro-batch changes of it, the importance of its entries, every store has for itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "page/page_layout.hpp"
#include "store/page_share.hpp"

namespace entropykv {

class HeadPages {
public:
    HeadPages(const PageLayout& layout, PageShare& share) : layout_(&layout), share_(&share) {}

    std::size_t size() const { return pages_.size(); }
    std::byte* operator[](int number) const { return pages_[index(number)]; }
    const std::vector<std::byte*>& all() const { return pages_; }
    // How many entries they have room for.
    int room() const { return static_cast<int>(pages_.size()) * layout_->entries; }

    // As many pages as hold so many entries: at least, or at most.
    void grow(int entries);
    void drop(int entries);
    void reserve(int entries) { pages_.reserve(pages_of(entries)); }
    std::size_t pages_of(int entries) const;

    // Importance of the entries of a page: in it, or where others own it, the head's own.
    float* importance(int number) {
        return is_shared(number) ? importance_.data() + index(number * layout_->entries)
                                 : layout_->importance(pages_[index(number)]);
    }
    const float* importance(int number) const {
        return const_cast<HeadPages*>(this)->importance(number);
    }
    // Copies of it, by entry; empty where no page is shared.
    const std::vector<float>& copied_importance() const { return importance_; }
    bool any_shared() const { return n_shared_ > 0; }

    // Marks all pages as shared.
    void share_all();
    // Makes a page, or all from one on, the head's own: copies, unless the others have left them.
    void own(int number);
    void own_from(std::size_t first);
    // How many of the pages [first, last) would have to be copied.
    std::size_t foreign(std::size_t first, std::size_t last) const;

    // Takes the pages of a checkpoint over, all of them shared, for which there is room to share;
    // or pages that are no pool's.
    void make_room_to_share(std::size_t pages);
    void take_over(std::vector<std::byte*> pages, std::vector<float> importance) noexcept;
    void look_at(std::vector<std::byte*> pages) { pages_ = std::move(pages); }
    // Has visit(page) return where the page is from now on, for every page.
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
    // Which pages others may own, too, and the importance of the entries in them, by entry; empty
    // where there are none.
    std::vector<std::uint8_t> shared_{};
    std::vector<float> importance_{};
    int n_shared_ = 0;
};

}  // namespace entropykv
