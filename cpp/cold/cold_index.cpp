#include "cold/cold_index.hpp"

#include <algorithm>

#include "decide/importance.hpp"
#include "platform/scratch.hpp"

namespace entropykv {

void ColdIndex::freeze(int number, float importance, std::int32_t now, std::int32_t due,
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

void ColdIndex::restore(int number) noexcept {
    const int page = layout_->page_of(number);
    const int slot = layout_->slot_of(number);
    records_.frozen_at(page)[slot] = kActive;
    if (records_.timed()) records_.dues(page)[slot] = kNever;
    --pages_[index(page)].n_frozen;
    --n_frozen_;
}

void ColdIndex::clear_detections() {
    if (!records_.timed()) return;
    for (int page = 0; page < n_pages(); ++page)
        std::fill_n(records_.detections(page), per_page(), Detections{});
}

void ColdIndex::reserve(std::size_t n_pages) {
    make_room(pages_, pages_.size() + n_pages);
    make_room(free_pages_, pages_.capacity());
    records_.reserve(pages_.size() + n_pages);
}

void ColdIndex::open_next() noexcept {
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

int ColdIndex::add_record(const ColdRecord& record) noexcept {
    const int number = open_ * per_page() + n_open_++;
    records_.positions(open_)[layout_->slot_of(number)] = record.position;
    ++pages_[index(open_)].n_records;
    freeze(number, record.importance, record.frozen_at, record.due, record.detections);
    return number;
}

int ColdIndex::least_page(const ImportanceSettings& settings, std::int32_t now) const noexcept {
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

void ColdIndex::forget_records(int page) noexcept {
    for (int i = page * per_page(); i < (page + 1) * per_page(); ++i) {
        if (frozen(i)) restore(i);
        records_.set(i, {});
    }
}

void ColdIndex::truncate_records(int page, std::int32_t from) {
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

void ColdIndex::free_page(int page) {
    pages_[index(page)] = Page{};
    --n_stored_;
    free_pages_.push_back(page);
}

}  // namespace entropykv
