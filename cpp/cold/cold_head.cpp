#include "cold/cold_head.hpp"

#include <algorithm>

#include "decide/importance.hpp"
#include "platform/prefetch.hpp"

namespace entropykv {

ColdLayout::ColdLayout(ColdType type, const PageLayout& hot)
    : page(hot), sketch(hot), codec(type, hot) {}

ColdHead::ColdHead(const ColdLayout& layout, ColdStorage& storage, std::size_t most_pages)
    : layout_(&layout),
      storage_(&storage),
      most_pages_(most_pages),
      open_rows_(layout.page.bytes),
      packed_(storage.page_bytes()),
      keys_(index(kGroupEntries * layout.page.k_dim)) {}

void ColdHead::prepare(int n_new) {
    const std::size_t n_pages = index(n_new / per_page() + 2);
    make_room(pages_, pages_.size() + n_pages);
    records_.reserve(pages_.capacity() * index(per_page()));
    make_room(free_pages_, pages_.capacity());
    while (sketches_.size() * index(kSketchesOfSlab) < pages_.size() + n_pages)
        sketches_.emplace_back(index(kSketchesOfSlab) * layout_->sketch.page_bytes());
    make_room(spare_, pages_.capacity());
    const std::size_t room = is_limited() ? most_pages_ - n_stored_ : n_pages;
    while (spare_.size() < std::min(n_pages, room)) spare_.push_back(storage_->take());
}

// ------------------------------------------------------------------------------------------------
// entries

int ColdHead::add(const std::byte* page, int slot, const ColdRecord& record, float decay,
                  const KernelTable& kernels) noexcept {
    dropped_page_ = kNone;
    n_dropped_ = 0;
    if (open_ == kNone || n_open_ == per_page()) {
        if (open_ != kNone) {
            if (is_limited() && n_stored_ >= most_pages_)
                drop_page(least_page(decay, record.frozen_at));
            close_open(kernels);
        }
        open_next();
    }
    copy_entry(layout_->page, page, slot, open_rows_.data(), n_open_);
    const int number = open_ * per_page() + n_open_++;
    records_.positions[index(number)] = record.position;
    ++page_of(number).n_records;
    freeze(number, record.importance, record.frozen_at, record.due, record.detections);
    return number;
}

void ColdHead::open_next() noexcept {
    if (free_pages_.empty()) {
        free_pages_.push_back(n_pages());
        pages_.emplace_back();
        records_.resize(pages_.size() * index(per_page()));
    }
    // The lowest number, whichever became free first: a session that is loaded takes the same.
    const auto lowest = std::min_element(free_pages_.begin(), free_pages_.end());
    open_ = *lowest;
    *lowest = free_pages_.back();
    free_pages_.pop_back();
    n_open_ = 0;
}

void ColdHead::close_open(const KernelTable& kernels) noexcept {
    pack(open_, open_rows_.data(), kernels);
    store(open_, packed_.data());
}

// Into packed_. The sketch is of what is read back: the same for a session that is loaded.
void ColdHead::pack(int page, std::byte* rows, const KernelTable& kernels) noexcept {
    layout_->codec.pack(rows, packed_.data());
    if (!layout_->codec.as_stored()) layout_->codec.unpack(packed_.data(), kernels, rows);
    layout_->sketch.draw(layout_->page, rows, keys_.data(), sketch_of(page));
}

void ColdHead::store(int number, const std::byte* packed) noexcept {
    Page& page = pages_[index(number)];
    page.place = spare_.back();
    spare_.pop_back();
    page.stored = true;
    ++n_stored_;
    storage_->write(page.place, packed);
}

void ColdHead::freeze(int number, float importance, std::int32_t now, std::int32_t due,
                      Detections detections) noexcept {
    records_.importance[index(number)] = importance;
    records_.frozen_at[index(number)] = now;
    records_.dues[index(number)] = due;
    records_.detections[index(number)] = detections;
    ++page_of(number).n_frozen;
    ++n_frozen_;
}

void ColdHead::restore(int number) noexcept {
    records_.frozen_at[index(number)] = kActive;
    records_.dues[index(number)] = kNever;
    --page_of(number).n_frozen;
    --n_frozen_;
}

const std::byte* ColdHead::read(int page, std::byte* buffer) const noexcept {
    if (page == open_) return open_rows_.data();
    return storage_->read(pages_[index(page)].place, buffer);
}

void ColdHead::take(const std::byte* rows, int record, const KernelTable& kernels, std::byte* page,
                    int slot) const noexcept {
    const int entry = layout_->page.slot_of(record);
    if (rows == open_rows_.data())
        copy_rows(layout_->page, rows, entry, page, slot);
    else
        layout_->codec.unpack(rows, entry, kernels, page, slot);
}

void ColdHead::ask_for_due(std::int32_t now) const noexcept {
    ask_for(reinterpret_cast<const std::byte*>(records_.importance.data()),
            records_.size() * sizeof(float));
    ask_for(reinterpret_cast<const std::byte*>(records_.detections.data()),
            records_.size() * sizeof(Detections));
    if (!storage_->in_place()) return;
    for (int page = 0; page < n_pages(); ++page) {
        if (n_frozen(page) == 0 || page == open_) continue;
        const std::byte* packed = storage_->read(pages_[index(page)].place, nullptr);
        for (int slot = 0; slot < per_page(); ++slot)
            if (due(page * per_page() + slot, now))
                ask_for(layout_->codec.rows(packed, slot), layout_->codec.entry_bytes());
    }
}

int ColdHead::count_due(std::int32_t now) const {
    return static_cast<int>(std::count_if(records_.dues.begin(), records_.dues.end(),
                                          [now](std::int32_t due) { return due <= now; }));
}

void ColdHead::products(const KernelTable& kernels, int page, const QueryRows& queries,
                        float* out) const noexcept {
    if (page + 1 < n_pages()) ask_for(sketch_of(page + 1), layout_->sketch.page_bytes());
    if (page == open_)
        kernels.products(layout_->page, open_rows_.data(), queries.data, queries.n, out,
                         per_page());
    else
        kernels.sketch_products(layout_->sketch, sketch_of(page), queries.data, queries.n, out,
                                per_page());
}

// ------------------------------------------------------------------------------------------------
// what goes

int ColdHead::least_page(float decay, std::int32_t now) const noexcept {
    int least = kNone;
    float least_worth = 0.0f;
    for (int page = 0; page < n_pages(); ++page) {
        if (!pages_[index(page)].stored) continue;
        float worth = 0.0f;
        for (int i = page * per_page(); i < (page + 1) * per_page(); ++i) {
            const ColdRecord r = record(i);
            if (r.frozen()) worth += r.importance * decay_factor(decay, now - r.frozen_at);
        }
        if (least == kNone || worth < least_worth) {
            least = page;
            least_worth = worth;
        }
    }
    return least;
}

void ColdHead::drop_page(int page) noexcept {
    dropped_page_ = page;
    n_dropped_ = pages_[index(page)].n_frozen;
    for (int i = page * per_page(); i < (page + 1) * per_page(); ++i) {
        if (frozen(i)) restore(i);
        records_.set(index(i), {});
    }
    spare_.push_back(pages_[index(page)].place);
    pages_[index(page)] = Page{};
    --n_stored_;
    free_pages_.push_back(page);
}

void ColdHead::truncate(std::int32_t from) {
    const std::int32_t now = from - 1;
    for (int page = 0; page < n_pages(); ++page) {
        Page& of = pages_[index(page)];
        for (int i = page * per_page(); i < (page + 1) * per_page(); ++i) {
            ColdRecord r = record(i);
            if (r.position >= from) {
                if (r.frozen()) restore(i);
                records_.set(index(i), {});
                --of.n_records;
            } else if (r.frozen() && r.frozen_at > now) {
                if (r.due != kNever) r.due = now + (r.due - r.frozen_at);
                r.frozen_at = now;
                records_.set(index(i), r);
            }
        }
        if (of.n_records == 0) free_page(page);
    }
}

// A page without records, if it is not free already.
void ColdHead::free_page(int page) {
    Page& of = pages_[index(page)];
    if (page == open_) {
        n_open_ = 0;
    } else if (of.stored) {
        storage_->release(of.place);
        of = Page{};
        --n_stored_;
        free_pages_.push_back(page);
    }
}

void ColdHead::clear_detections() {
    std::fill(records_.detections.begin(), records_.detections.end(), Detections{});
}

}  // namespace entropykv
