#include "cold/cold_head.hpp"

#include <algorithm>

#include "decide/importance.hpp"
#include "platform/prefetch.hpp"
#include "platform/scratch.hpp"

namespace entropykv {

ColdLayout::ColdLayout(ColdType type, const PageLayout& hot)
    : page(hot), sketch(hot), codec(type, hot) {}

ColdHead::ColdHead(const ColdLayout& layout, ColdStorage& storage, std::size_t most_pages,
                   bool timed)
    : ColdIndex(layout.page, timed),
      cold_(&layout),
      storage_(&storage),
      most_pages_(most_pages),
      open_rows_(layout.page.bytes),
      packed_(storage.page_bytes()),
      keys_(index(kGroupEntries * layout.page.k_dim)) {}

void ColdHead::prepare(int n_new) {
    const std::size_t n_pages = index(n_new / per_page() + 2);
    reserve(n_pages);
    const std::size_t n_slabs = (pages_.size() + n_pages - 1) / index(kSketchesPerSlab) + 1;
    make_room(sketches_, n_slabs);
    while (sketches_.size() < n_slabs)
        sketches_.emplace_back(index(kSketchesPerSlab) * cold_->sketch.page_bytes());
    make_room(spare_, pages_.capacity());
    const std::size_t room = is_limited() ? most_pages_ - n_stored_ : n_pages;
    while (spare_.size() < std::min(n_pages, room)) spare_.push_back(storage_->take());
}

std::size_t ColdHead::sketch_bytes() const {
    std::size_t bytes = heap_bytes(sketches_);
    for (const AlignedBytes& slab : sketches_) bytes += slab.heap_bytes();
    return bytes;
}

std::size_t ColdHead::overhead_bytes() const {
    const std::size_t open_entries = open_ == kNone ? 0 : cold_->page.bytes;
    return records_.bytes() + heap_bytes(pages_) + heap_bytes(free_pages_) + heap_bytes(spare_) +
           heap_bytes(keys_) + packed_.heap_bytes() + open_rows_.heap_bytes() - open_entries;
}

// The following functions add, freeze and restore entries.

int ColdHead::add(const std::byte* page, int slot, const ColdRecord& record,
                  const ImportanceSettings& settings, const KernelTable& kernels) noexcept {
    dropped_page_ = kNone;
    n_dropped_ = 0;
    if (is_open_full()) {
        if (open_ != kNone) {
            if (is_limited() && n_stored_ >= most_pages_)
                drop_page(least_page(settings, record.frozen_at));
            close_open(kernels);
        }
        open_next();
    }
    copy_entry(cold_->page, page, slot, open_rows_.data(), n_open_);
    return add_record(record);
}

void ColdHead::close_open(const KernelTable& kernels) noexcept {
    pack(open_, open_rows_.data(), kernels);
    store(open_, packed_.data());
}

// Packs a page into packed_, and makes its sketch from what would be read back, so that a session
// that was saved and loaded has the same sketch.
void ColdHead::pack(int page, std::byte* rows, const KernelTable& kernels) noexcept {
    cold_->codec.pack(rows, packed_.data());
    if (!cold_->codec.as_stored()) cold_->codec.unpack(packed_.data(), kernels, rows);
    cold_->sketch.draw(cold_->page, rows, keys_.data(), sketch_of(page));
}

void ColdHead::store(int number, const std::byte* packed) noexcept {
    Page& page = pages_[index(number)];
    page.place = spare_.back();
    spare_.pop_back();
    page.stored = true;
    ++n_stored_;
    storage_->write(page.place, packed);
}

const std::byte* ColdHead::read(int page, std::byte* buffer) const noexcept {
    if (page == open_) return open_rows_.data();
    return storage_->read(pages_[index(page)].place, buffer);
}

void ColdHead::take(const std::byte* rows, int record, const KernelTable& kernels, std::byte* page,
                    int slot) const noexcept {
    const int entry = cold_->page.slot_of(record);
    if (rows == open_rows_.data())
        copy_rows(cold_->page, rows, entry, page, slot);
    else
        cold_->codec.unpack(rows, entry, kernels, page, slot);
}

void ColdHead::prefetch_due(std::int32_t now) const noexcept {
    records_.prefetch_all();
    if (!storage_->in_place()) return;
    for (int page = 0; page < n_pages(); ++page) {
        if (n_frozen(page) == 0 || page == open_ || records_.count_due(page, now) == 0) continue;
        const std::byte* packed = storage_->read(pages_[index(page)].place, nullptr);
        for (int slot = 0; slot < per_page(); ++slot)
            if (records_.due(page, slot, now))
                prefetch(cold_->codec.rows(packed, slot), cold_->codec.entry_bytes());
    }
}

void ColdHead::products(const KernelTable& kernels, int page, const QueryRows& queries,
                        float* out) const noexcept {
    if (page + 1 < n_pages()) prefetch(sketch_of(page + 1), cold_->sketch.page_bytes());
    if (page == open_)
        kernels.products(cold_->page, open_rows_.data(), queries.data, queries.n, out, per_page());
    else
        kernels.sketch_products(cold_->sketch, sketch_of(page), queries.data, queries.n, out,
                                per_page());
}

// The following functions drop entries.

void ColdHead::drop_page(int page) noexcept {
    dropped_page_ = page;
    n_dropped_ = n_frozen(page);
    forget_records(page);
    spare_.push_back(pages_[index(page)].place);
    free_page(page);
}

void ColdHead::truncate(std::int32_t from) {
    for (int page = 0; page < n_pages(); ++page) {
        truncate_records(page, from);
        if (pages_[index(page)].n_records == 0) release_page(page);
    }
}

// Frees a page without records, unless it is free already.
void ColdHead::release_page(int page) {
    if (page == open_) {
        n_open_ = 0;
    } else if (pages_[index(page)].stored) {
        storage_->release(pages_[index(page)].place);
        free_page(page);
    }
}

}  // namespace entropykv
