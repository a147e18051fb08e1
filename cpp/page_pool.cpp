#include "page_pool.hpp"

#include <algorithm>
#include <stdexcept>

namespace entropykv {

PagePool::PagePool(std::size_t page_bytes, std::size_t budget_pages)
    : page_bytes_(page_bytes), budget_pages_(budget_pages) {}

std::size_t PagePool::mapped_bytes() const {
    std::size_t total = 0;
    for (const Slab& slab : slabs_) total += slab.memory.size();
    return total;
}

void PagePool::add_slab() {
    const std::size_t pages = std::min(pages_of_slab(page_bytes_), budget_pages_ - mapped_pages_);
    slabs_.push_back({MappedMemory(pages * page_bytes_), pages});
    const Slab& slab = slabs_.back();
    mapped_pages_ += slab.pages;
    // Handed out from the back: ascending addresses.
    for (std::size_t i = slab.pages; i-- > 0;)
        free_.push_back(slab.memory.data() + i * page_bytes_);
}

void PagePool::map(std::size_t pages) {
    while (mapped_pages_ < std::min(pages, budget_pages_)) add_slab();
}

std::byte* PagePool::allocate() {
    if (used_pages_ == budget_pages_) return nullptr;
    if (free_.empty()) add_slab();
    std::byte* page = free_.back();
    free_.pop_back();
    ++used_pages_;
    peak_pages_ = std::max(peak_pages_, used_pages_);
    return page;
}

void PagePool::release(std::byte* page) {
    free_.push_back(page);
    --used_pages_;
}

void PagePool::set_budget(std::size_t pages) {
    if (used_pages_ > pages)
        throw std::logic_error("the pool uses more pages than its new budget has");
    budget_pages_ = pages;
}

bool PagePool::holds(const Slab& slab, const std::byte* page) const {
    return page >= slab.memory.data() && page < slab.memory.data() + slab.pages * page_bytes_;
}

std::size_t PagePool::slab_of(const std::byte* page) const {
    for (std::size_t i = 0; i < slabs_.size(); ++i)
        if (holds(slabs_[i], page)) return i;
    throw std::logic_error("a page that is not of this pool");
}

std::byte* PagePool::relocate(std::byte* page) {
    // The first slabs that hold all pages in use stay; free pages of theirs take the rest.
    std::size_t kept_slabs = 0;
    for (std::size_t pages = 0; pages < used_pages_; ++kept_slabs)
        pages += slabs_[kept_slabs].pages;
    if (slab_of(page) < kept_slabs) return page;
    const auto target = std::find_if(free_.begin(), free_.end(), [&](const std::byte* candidate) {
        return slab_of(candidate) < kept_slabs;
    });
    if (target == free_.end()) throw std::logic_error("no free page to relocate to");
    std::byte* moved = *target;
    std::copy(page, page + page_bytes_, moved);
    *target = page;
    return moved;
}

void PagePool::trim() {
    while (!slabs_.empty()) {
        const Slab& last = slabs_.back();
        const auto in_last = [&](const std::byte* page) { return holds(last, page); };
        const auto n_free = std::count_if(free_.begin(), free_.end(), in_last);
        if (static_cast<std::size_t>(n_free) < last.pages) return;
        free_.erase(std::remove_if(free_.begin(), free_.end(), in_last), free_.end());
        mapped_pages_ -= last.pages;
        slabs_.pop_back();
    }
}

}  // namespace entropykv
