#include "store/page_share.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace entropykv {

std::byte* PageShare::allocate() {
    std::byte* page = pool_->pages().allocate();
    if (page == nullptr) throw std::logic_error("the budgets of the KV heads exceed the pool");
    return page;
}

std::byte* PageShare::take() {
    std::byte* page = allocate();
    peak_ = std::max(peak_, ++used_);
    return page;
}

void PageShare::release(std::byte* page) {
    pool_->pages().release(page);
    --used_;
}

void PageShare::note_peak() { peak_ = std::max(peak_, used_); }

std::byte* PageShare::own(std::byte* page, std::size_t bytes) {
    if (!is_foreign(page)) return page;
    std::byte* copy = allocate();
    std::memcpy(copy, page, bytes);
    pool_->pages().release(page);
    return copy;
}

void PageShare::set(std::size_t pages) {
    pool_->set_share(budget_, pages);
    budget_ = pages;
}

}  // namespace entropykv
