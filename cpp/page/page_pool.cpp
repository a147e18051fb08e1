#include "page/page_pool.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "platform/scratch.hpp"

namespace entropykv {
// Makes all lists long enough for `pages` pages, so that handing out and taking back pages
// allocates nothing.
void PagePool::make_lists(std::size_t pages) {
    make_room(free_, pages);
    make_room(free_in_files_, pages);
    make_room(owners_, pages);
}

void PagePool::map(std::size_t pages) {
    pages = std::min(pages, budget_pages_);
    make_lists(pages);
    pages_.grow(pages, budget_pages_);
}

// Takes memory for one more page. If there is none, a free page of a file will do; throws
// std::bad_alloc if there is no such page either.
void PagePool::add_page() {
    try {
        map(owners_.size() + 1);
    } catch (const std::bad_alloc&) {
        if (free_in_files_.empty()) throw;
        return;
    }
    free_.push_back(pages_.at(owners_.size()));
    owners_.push_back(0);
}

void PagePool::set_free(std::byte* page, std::size_t number) {
    (pages_.is_in_file(number) ? free_in_files_ : free_).push_back(page);
    pages_.note_free(number);
}

std::byte* PagePool::allocate() {
    if (used_pages_ == budget_pages_) return nullptr;
    if (free_.empty() && owners_.size() < budget_pages_) add_page();
    std::vector<std::byte*>& from = free_.empty() ? free_in_files_ : free_;
    std::byte* page = from.back();
    from.pop_back();
    const std::size_t number = pages_.number_of(page);
    owners_[number] = 1;
    pages_.note_used(number);
    ++used_pages_;
    peak_pages_ = std::max(peak_pages_, used_pages_);
    return page;
}

std::byte* PagePool::adopt(const std::shared_ptr<MappedFile>& file, std::size_t pages,
                           const std::vector<std::size_t>& unused) {
    const std::size_t used = pages - unused.size();
    if (used == 0 || used > budget_pages_ - used_pages_) return nullptr;
    if (used_pages_ == 0) keep_first();
    const std::size_t first = owners_.size();
    if (used > budget_pages_ - std::min(budget_pages_, first)) return nullptr;
    make_lists(first + pages);
    pages_.append_file(file, first, pages);
    owners_.resize(first + pages, 1);
    for (const std::size_t number : unused) set_free(pages_.at(first + number), first + number);
    used_pages_ += used;
    peak_pages_ = std::max(peak_pages_, used_pages_);
    return file->data();
}

void PagePool::release(std::byte* page) {
    const std::size_t number = pages_.number_of(page);
    if (--owners_[number] > 0) return;
    set_free(page, number);
    --used_pages_;
}

void PagePool::set_budget(std::size_t pages) {
    if (used_pages_ > pages)
        throw std::logic_error("the pool uses more pages than its new budget has");
    budget_pages_ = pages;
}

// Moves those free pages to the front of the list that will be in use after compact(); returns how
// many there are.
std::size_t PagePool::gather_room() {
    const auto end = std::partition(free_.begin(), free_.end(), [&](const std::byte* page) {
        return pages_.number_of(page) < used_pages_;
    });
    return static_cast<std::size_t>(end - free_.begin());
}

std::byte* PagePool::relocate(std::byte* page, std::size_t& n_taken, std::size_t n_room) {
    const std::size_t from = pages_.number_of(page);
    if (from < used_pages_) return page;
    if ((owners_[from] & kMoved) != 0) return pages_.at(owners_[from] & ~kMoved);
    if (n_taken == n_room) throw std::logic_error("more pages to relocate than are in use");
    std::byte* moved = free_[n_taken++];
    std::copy(page, page + page_bytes_, moved);
    const std::size_t to = pages_.number_of(moved);
    owners_[to] = owners_[from];
    owners_[from] = kMoved | static_cast<std::uint32_t>(to);
    return moved;
}

// Keeps the first used_pages_ pages, and gives the memory behind them back to the system.
void PagePool::keep_first() {
    free_.clear();
    free_in_files_.clear();
    owners_.resize(used_pages_);
    pages_.shrink(used_pages_);
    pages_.note_first_used(used_pages_);
}

}  // namespace entropykv
