#include "store/head.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "decide/budget.hpp"
#include "platform/scratch.hpp"

namespace entropykv {
namespace {

// Returns (position, index) of all entries, sorted by position.
std::vector<std::pair<std::int32_t, int>> ordered(const Head& head) {
    std::vector<std::pair<std::int32_t, int>> order;
    for (int i = 0; i < head.count(); ++i) order.emplace_back(head.position(i), i);
    std::sort(order.begin(), order.end());
    return order;
}

}  // namespace

std::size_t HeadPages::pages_of(int entries) const {
    return index(pages_for(entries, layout_->entries));
}

void HeadPages::grow(int entries) {
    const std::size_t wanted = pages_of(entries);
    make_room(pages_, wanted);
    if (n_shared_ > 0) make_room_to_share(wanted);
    while (pages_.size() < wanted) {
        pages_.push_back(share_->take());
        if (n_shared_ == 0) continue;
        shared_.push_back(0);
        importance_.resize(pages_.size() * index(layout_->entries));
    }
}

void HeadPages::drop(int entries) {
    const std::size_t wanted = pages_of(entries);
    while (pages_.size() > wanted) {
        share_->release(pages_.back());
        pages_.pop_back();
        if (n_shared_ == 0) continue;
        n_shared_ -= shared_.back();
        shared_.pop_back();
        forget_if_alone();
    }
}

void HeadPages::make_room_to_share(std::size_t pages) {
    make_room(shared_, pages);
    make_room(importance_, pages * index(layout_->entries));
}

void HeadPages::share_all() {
    const std::size_t per_page = index(layout_->entries);
    make_room_to_share(pages_.size());
    importance_.resize(pages_.size() * per_page);
    shared_.resize(pages_.size(), 0);
    for (std::size_t page = 0; page < pages_.size(); ++page) {
        if (shared_[page] != 0) continue;
        const float* importance = layout_->importance(pages_[page]);
        std::copy(importance, importance + per_page, importance_.data() + page * per_page);
        shared_[page] = 1;
        ++n_shared_;
    }
}

void HeadPages::own(int number) {
    if (!is_shared(number)) return;
    std::byte*& page = pages_[index(number)];
    page = share_->own(page, layout_->bytes);
    const std::size_t per_page = index(layout_->entries);
    const float* importance = importance_.data() + index(number) * per_page;
    std::copy(importance, importance + per_page, layout_->importance(page));
    shared_[index(number)] = 0;
    --n_shared_;
    forget_if_alone();
}

void HeadPages::own_from(std::size_t first) {
    for (std::size_t page = first; n_shared_ > 0 && page < pages_.size(); ++page)
        own(static_cast<int>(page));
}

std::size_t HeadPages::count_shared(std::size_t first, std::size_t last) const {
    std::size_t n = 0;
    last = std::min(last, pages_.size());
    for (std::size_t page = first; n_shared_ > 0 && page < last; ++page)
        n += shared_[page] != 0 && share_->is_shared_page(pages_[page]) ? 1 : 0;
    return n;
}

void HeadPages::take_over(std::vector<std::byte*> pages, std::vector<float> importance) noexcept {
    pages_ = std::move(pages);
    shared_.assign(pages_.size(), 1);
    n_shared_ = static_cast<int>(pages_.size());
    importance_ = std::move(importance);
    forget_if_alone();
}

void HeadPages::forget_if_alone() noexcept {
    if (n_shared_ > 0) return;
    std::vector<std::uint8_t>().swap(shared_);
    std::vector<float>().swap(importance_);
}

void Head::append(const StagedEntries& staged, const KernelTable& kernels) noexcept {
    const int per_page = layout_->entries;
    int i = 0;
    if (count_ % per_page == 0)
        for (; i + per_page <= staged.count; i += per_page)
            std::memcpy(writable_place(count_ + i).page, staged.pages[i / per_page],
                        layout_->bytes);
    EntryCopies copies(*layout_, kernels);
    for (; i < staged.count; ++i) {
        const Slot from = place(count_ + i, staged);
        const Slot to = writable_place(count_ + i);
        copies.add(from.page, from.index, to.page, to.index);
        copy_metadata(*layout_, from.page, from.index, to.page, to.index);
    }
    for (i = 0; i < staged.count; ++i) frozen.begin(count_ + i);
    count_ += staged.count;
}

// Between micro-batches, a shared page is copied before it is written to. Within a micro-batch,
// this is only called for pages whose other owners have left. Such a page may still be marked as
// shared: then own() writes the head's copy of the importance back to it, and copies no page.
Slot Head::writable_place(int i) noexcept {
    pages.own(layout_->page_of(i));
    return place(i);
}

void Head::keep(const std::uint8_t* mask, const StagedEntries& staged,
                const KernelTable& kernels) noexcept {
    EntryCopies copies(*layout_, kernels);
    const auto copy = [&](const Slot& from, const Slot& to) {
        copies.add(from.page, from.index, to.page, to.index);
        copy_metadata(*layout_, from.page, from.index, to.page, to.index);
    };
    if (undo && undo->records()) undo->save_dropped(*this, mask, kernels);
    // Staged survivors fill the holes among the stored entries first.
    int hole = 0;
    const auto next_hole = [&] {
        const int n = count_ - hole;
        const void* found =
            n > 0 ? std::memchr(mask + hole, 0, static_cast<std::size_t>(n)) : nullptr;
        hole = found == nullptr ? std::max(hole, count_)
                                : static_cast<int>(static_cast<const std::uint8_t*>(found) - mask);
        return hole;
    };
    int end = count_;
    for (int i = 0; i < staged.count; ++i) {
        if (mask[count_ + i] == 0) continue;
        const int target = next_hole() < count_ ? hole++ : end++;
        copy(place(count_ + i, staged), writable_place(target));
        frozen.begin(target);
    }
    // The last survivors fill the holes that are left. If staged entries were appended, there are
    // none.
    if (end == count_) {
        while (true) {
            while (end > hole && mask[end - 1] == 0) --end;
            if (next_hole() >= end) break;
            --end;
            const Slot to = writable_place(hole);
            const float of_entry = importance(end);
            copy(place(end), to);
            layout_->importance(to.page)[to.index] = of_entry;
            if (undo && undo->records()) undo->note_move(end, hole);
            frozen.move(end, hole++);
        }
    }
    count_ = end;
}

void Head::mark_before(std::int32_t end, std::uint8_t* mask) const noexcept {
    for (int i = 0; i < count_; ++i) mask[i] = position(i) < end ? 1 : 0;
}

std::size_t Head::first_written(int n_tokens) const {
    if (count_ + n_tokens > budget_) return 0;
    return static_cast<std::size_t>(layout_->page_of(count_));
}

std::size_t Head::count_shared_holes(const std::uint8_t* mask) const noexcept {
    const auto n_kept = static_cast<int>(std::count(mask, mask + count_, std::uint8_t{1}));
    std::size_t n = 0;
    for (int first = 0; first < n_kept; first += layout_->entries) {
        const int last = std::min(n_kept, first + layout_->entries);
        if (std::find(mask + first, mask + last, std::uint8_t{0}) == mask + last) continue;
        const auto page = static_cast<std::size_t>(layout_->page_of(first));
        n += pages.count_shared(page, page + 1);
    }
    return n;
}

StoredRows rows_of(const Head& head) {
    const PageLayout& layout = head.layout();
    StoredRows rows;
    const auto order = ordered(head);
    rows.k.resize(order.size() * PageLayout::index(layout.k_dim));
    rows.v.resize(order.size() * PageLayout::index(layout.v_dim));
    float* k = rows.k.data();
    float* v = rows.v.data();
    for (const auto& [position, i] : order) {
        const Slot slot = head.place(i);
        load_k(layout, slot.page, slot.index, k);
        load_v(layout, slot.page, slot.index, v);
        rows.positions.push_back(position);
        rows.importance.push_back(head.importance(i));
        k += layout.k_dim;
        v += layout.v_dim;
    }
    return rows;
}

std::vector<std::int32_t> positions_of(const Head& head) {
    std::vector<std::int32_t> positions;
    for (const auto& [position, i] : ordered(head)) positions.push_back(position);
    return positions;
}

std::vector<float> importance_of(const Head& head) {
    std::vector<float> importance;
    for (const auto& [position, i] : ordered(head)) importance.push_back(head.importance(i));
    return importance;
}

}  // namespace entropykv
