#include "page/page_pool.hpp"

#include <algorithm>
#include <numeric>
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
    slabs_.push_back({MappedMemory(pages * page_bytes_), pages, {}});
    Slab& slab = slabs_.back();
    slab.owners.resize(pages);
    mapped_pages_ += slab.pages;
    sort_slabs();
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
    owners_of(page) = 1;
    ++used_pages_;
    peak_pages_ = std::max(peak_pages_, used_pages_);
    return page;
}

void PagePool::release(std::byte* page) {
    if (--owners_of(page) > 0) return;
    free_.push_back(page);
    --used_pages_;
}

void PagePool::set_budget(std::size_t pages) {
    if (used_pages_ > pages)
        throw std::logic_error("the pool uses more pages than its new budget has");
    budget_pages_ = pages;
}

std::size_t PagePool::slab_of(const std::byte* page) const {
    const auto after = std::upper_bound(
        by_address_.begin(), by_address_.end(), page,
        [&](const std::byte* at, std::uint32_t slab) { return at < slabs_[slab].memory.data(); });
    if (after != by_address_.begin()) {
        const Slab& slab = slabs_[*(after - 1)];
        if (page < slab.memory.data() + slab.pages * page_bytes_) return *(after - 1);
    }
    throw std::logic_error("a page that is not of this pool");
}

const std::uint32_t& PagePool::owners_of(const std::byte* page) const {
    const Slab& slab = slabs_[slab_of(page)];
    return slab.owners[static_cast<std::size_t>(page - slab.memory.data()) / page_bytes_];
}

// How many of the first slabs hold as many pages as are in use.
std::size_t PagePool::slabs_of_used_pages() const {
    std::size_t n = 0;
    for (std::size_t pages = 0; pages < used_pages_; ++n) pages += slabs_[n].pages;
    return n;
}

std::vector<std::byte*> PagePool::free_pages_of(std::size_t n_slabs) const {
    std::vector<std::byte*> pages;
    for (std::byte* page : free_)
        if (slab_of(page) < n_slabs) pages.push_back(page);
    return pages;
}

std::byte* PagePool::relocate(std::byte* page, Moves& moves) {
    if (slab_of(page) < moves.n_kept) return page;
    const std::uint32_t owners = owners_of(page);
    if (owners > 1)
        if (const auto found = moves.shared.find(page); found != moves.shared.end())
            return found->second;
    if (moves.room.empty()) throw std::logic_error("more pages to relocate than are in use");
    std::byte* moved = moves.room.back();
    moves.room.pop_back();
    std::copy(page, page + page_bytes_, moved);
    owners_of(moved) = owners;
    if (owners > 1) moves.shared.emplace(page, moved);
    return moved;
}

// Gives the slabs behind the first n back to the system: no page of theirs is in use.
void PagePool::keep_slabs(std::size_t n, std::vector<std::byte*> free) {
    while (slabs_.size() > n) {
        mapped_pages_ -= slabs_.back().pages;
        slabs_.pop_back();
    }
    free_ = std::move(free);
    sort_slabs();
}

void PagePool::sort_slabs() {
    by_address_.resize(slabs_.size());
    std::iota(by_address_.begin(), by_address_.end(), 0u);
    std::sort(by_address_.begin(), by_address_.end(), [&](std::uint32_t a, std::uint32_t b) {
        return slabs_[a].memory.data() < slabs_[b].memory.data();
    });
}

}  // namespace entropykv
