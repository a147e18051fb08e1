#include "store/head_pages.hpp"

#include <algorithm>

#include "decide/budget.hpp"
#include "platform/scratch.hpp"

namespace entropykv {

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

}  // namespace entropykv
