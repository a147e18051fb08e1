#include "cold/cold_head.hpp"

#include <algorithm>

#include "platform/prefetch.hpp"
#include "platform/scratch.hpp"

namespace entropykv {
namespace {

int count_until(const std::int32_t* dues, int n, std::int32_t now) {
    int found = 0;
    for (int i = 0; i < n; ++i) found += dues[i] <= now ? 1 : 0;
    return found;
}

}  // namespace

ColdRecords::ColdRecords(const PageLayout& layout, bool timed)
    : layout_(&layout),
      per_page_(layout.entries),
      timed_(timed),
      column_bytes_(index(kPagesOfBlock * per_page_) * sizeof(std::int32_t)) {}

std::size_t ColdRecords::bytes() const {
    std::size_t bytes = heap_bytes(blocks_);
    for (const std::vector<std::byte>& block : blocks_) bytes += heap_bytes(block);
    return bytes;
}

void ColdRecords::reserve(std::size_t n_pages) {
    const std::size_t n_blocks = (n_pages + kPagesOfBlock - 1) / kPagesOfBlock;
    if (n_blocks <= blocks_.size()) return;
    make_room(blocks_, n_blocks);
    static_assert(sizeof(Detections) == 2 * sizeof(std::int32_t), "two columns");
    while (blocks_.size() < n_blocks) blocks_.emplace_back(column_bytes_ * (timed_ ? 6 : 3));
}

void ColdRecords::resize(int n_pages) noexcept {
    const int before = size();
    n_pages_ = n_pages;
    for (int i = before; i < size(); ++i) set(i, {});
}

int ColdRecords::count_due(std::int32_t now) const noexcept {
    int n = 0;
    for (int page = 0; timed_ && page < n_pages_; page += kPagesOfBlock)
        n += count_until(dues(page), std::min(kPagesOfBlock, n_pages_ - page) * per_page_, now);
    return n;
}

int ColdRecords::count_due(int page, std::int32_t now) const noexcept {
    return timed_ ? count_until(dues(page), per_page_, now) : 0;
}

void ColdRecords::prefetch_all() const noexcept {
    for (int page = 0; timed_ && page < n_pages_; page += kPagesOfBlock) {
        const std::size_t n = index(std::min(kPagesOfBlock, n_pages_ - page) * per_page_);
        prefetch(reinterpret_cast<const std::byte*>(importance(page)), n * sizeof(float));
        prefetch(reinterpret_cast<const std::byte*>(detections(page)), n * sizeof(Detections));
    }
}

ColdRecord ColdRecords::get(int i) const noexcept {
    const int page = layout_->page_of(i);
    const int slot = layout_->slot_of(i);
    ColdRecord record{positions(page)[slot], importance(page)[slot], frozen_at(page)[slot]};
    if (!timed_) return record;
    record.due = dues(page)[slot];
    record.detections = detections(page)[slot];
    return record;
}

void ColdRecords::set(int i, const ColdRecord& record) noexcept {
    const int page = layout_->page_of(i);
    const int slot = layout_->slot_of(i);
    positions(page)[slot] = record.position;
    importance(page)[slot] = record.importance;
    frozen_at(page)[slot] = record.frozen_at;
    if (!timed_) return;
    dues(page)[slot] = record.due;
    detections(page)[slot] = record.detections;
}

ColdLayout::ColdLayout(ColdType type, const PageLayout& hot)
    : page(hot), sketch(hot), codec(type, hot) {}

ColdHead::ColdHead(const ColdLayout& layout, ColdStorage& storage, std::size_t most_pages,
                   bool timed)
    : layout_(&layout.page),
      records_(layout.page, timed),
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

// Packs a page into packed_, replaces its rows by what would be read back, and makes its sketch
// from these, so that a session that was saved and loaded has the same sketch.
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

void ColdHead::freeze(int number, float importance, std::int32_t now, std::int32_t due,
                      Detections detections) noexcept {
    const int page = layout_->page_of(number);
    const int slot = layout_->slot_of(number);
    records_.importance(page)[slot] = importance;
    records_.frozen_at(page)[slot] = now;
    if (records_.timed()) {
        records_.dues(page)[slot] = due;
        records_.detections(page)[slot] = detections;
    }
    ++pages_[index(page)].n_frozen;
    ++n_frozen_;
}

void ColdHead::restore(int number) noexcept {
    const int page = layout_->page_of(number);
    const int slot = layout_->slot_of(number);
    records_.frozen_at(page)[slot] = kActive;
    if (records_.timed()) records_.dues(page)[slot] = kNever;
    --pages_[index(page)].n_frozen;
    --n_frozen_;
}

void ColdHead::clear_detections() {
    if (!records_.timed()) return;
    for (int page = 0; page < n_pages(); ++page)
        std::fill_n(records_.detections(page), per_page(), Detections{});
}

void ColdHead::reserve(std::size_t n_pages) {
    make_room(pages_, pages_.size() + n_pages);
    make_room(free_pages_, pages_.capacity());
    records_.reserve(pages_.size() + n_pages);
}

void ColdHead::open_next() noexcept {
    if (free_pages_.empty()) {
        free_pages_.push_back(n_pages());
        pages_.emplace_back();
        records_.resize(n_pages());
    }
    // Takes the lowest number, no matter which became free first, because a loaded session must
    // choose the same page.
    const auto lowest = std::min_element(free_pages_.begin(), free_pages_.end());
    open_ = *lowest;
    *lowest = free_pages_.back();
    free_pages_.pop_back();
    n_open_ = 0;
}

int ColdHead::add_record(const ColdRecord& record) noexcept {
    const int number = open_ * per_page() + n_open_++;
    records_.positions(open_)[layout_->slot_of(number)] = record.position;
    ++pages_[index(open_)].n_records;
    freeze(number, record.importance, record.frozen_at, record.due, record.detections);
    return number;
}

int ColdHead::least_page(const ImportanceSettings& settings, std::int32_t now) const noexcept {
    int least = kNone;
    float least_worth = 0.0f;
    for (int page = 0; page < n_pages(); ++page) {
        if (!pages_[index(page)].stored) continue;
        float worth = 0.0f;
        for (int i = page * per_page(); i < (page + 1) * per_page(); ++i) {
            const ColdRecord r = record(i);
            if (!r.frozen()) continue;
            const float factor = decay_factor(settings.decay, now - r.frozen_at);
            worth += settings.score_of(settings.decayed(r.importance, factor));
        }
        if (least == kNone || worth < least_worth) {
            least = page;
            least_worth = worth;
        }
    }
    return least;
}

void ColdHead::forget_records(int page) noexcept {
    for (int i = page * per_page(); i < (page + 1) * per_page(); ++i) {
        if (frozen(i)) restore(i);
        records_.set(i, {});
    }
}

void ColdHead::truncate_records(int page, std::int32_t from) {
    const std::int32_t now = from - 1;
    for (int i = page * per_page(); i < (page + 1) * per_page(); ++i) {
        ColdRecord r = record(i);
        if (r.position >= from) {
            if (r.frozen()) restore(i);
            records_.set(i, {});
            --pages_[index(page)].n_records;
        } else if (r.frozen() && r.frozen_at > now) {
            if (r.due != kNever) r.due = now + (r.due - r.frozen_at);
            r.frozen_at = now;
            records_.set(i, r);
        }
    }
}

void ColdHead::free_page(int page) {
    pages_[index(page)] = Page{};
    --n_stored_;
    free_pages_.push_back(page);
}

}  // namespace entropykv
