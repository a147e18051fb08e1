#include "page_pool.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>

namespace entropykv {
namespace {

// One slab is one huge page where the system has them: attention reads every page of the pool, and
// 4 KiB pages would cost a TLB miss for each.
constexpr std::size_t kSlabBytes = std::size_t{2} << 20;

std::byte* map_memory(std::size_t bytes, std::size_t alignment) {
    const std::size_t total = bytes + alignment;
    void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    auto* start = static_cast<std::byte*>(memory);
    const auto address = reinterpret_cast<std::size_t>(start);
    const std::size_t skipped = (alignment - address % alignment) % alignment;
    if (skipped > 0) munmap(start, skipped);
    if (alignment > skipped) munmap(start + skipped + bytes, alignment - skipped);
    return start + skipped;
}

}  // namespace

PagePool::PagePool(std::size_t page_bytes, std::size_t budget_pages)
    : page_bytes_(page_bytes), budget_pages_(budget_pages) {}

PagePool::~PagePool() {
    for (const Slab& slab : slabs_) munmap(slab.start, slab.mapped);
}

std::size_t PagePool::mapped_bytes() const {
    std::size_t total = 0;
    for (const Slab& slab : slabs_) total += slab.mapped;
    return total;
}

void PagePool::add_slab() {
    const auto system_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t per_slab = std::max<std::size_t>(1, kSlabBytes / page_bytes_);
    Slab slab{};
    slab.pages = std::min(per_slab, budget_pages_ - mapped_pages_);
    slab.mapped = (slab.pages * page_bytes_ + system_page - 1) / system_page * system_page;
    const bool whole = slab.pages == per_slab;
    slab.start = map_memory(slab.mapped, whole ? kSlabBytes : system_page);
#if defined(MADV_HUGEPAGE)
    if (whole) madvise(slab.start, slab.mapped, MADV_HUGEPAGE);
#endif
    slabs_.push_back(slab);
    mapped_pages_ += slab.pages;
    // Handed out from the back: ascending addresses.
    for (std::size_t i = slab.pages; i-- > 0;) free_.push_back(slab.start + i * page_bytes_);
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

std::size_t PagePool::slab_of(const std::byte* page) const {
    for (std::size_t i = 0; i < slabs_.size(); ++i)
        if (page >= slabs_[i].start && page < slabs_[i].start + slabs_[i].pages * page_bytes_)
            return i;
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
        const auto in_last = [&](const std::byte* page) {
            return page >= last.start && page < last.start + last.pages * page_bytes_;
        };
        const auto n_free = std::count_if(free_.begin(), free_.end(), in_last);
        if (static_cast<std::size_t>(n_free) < last.pages) return;
        free_.erase(std::remove_if(free_.begin(), free_.end(), in_last), free_.end());
        munmap(last.start, last.mapped);
        mapped_pages_ -= last.pages;
        slabs_.pop_back();
    }
}

}  // namespace entropykv
