#include "cold/cold_records.hpp"

#include <algorithm>

#include "platform/prefetch.hpp"
#include "platform/scratch.hpp"

namespace entropykv {

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

namespace {

int count_until(const std::int32_t* dues, int n, std::int32_t now) {
    int found = 0;
    for (int i = 0; i < n; ++i) found += dues[i] <= now ? 1 : 0;
    return found;
}

}  // namespace

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

}  // namespace entropykv
