// The frozen entries of a head as bytes, for session files: three 32-bit numbers (pages of records,
// the open page, its entries), the records, the open page as the store has it, then the packed rows
// of every other page that has records. Numbers are little-endian. Whoever changes any of it
// changes the version of the session files with it (session_file.py).
#include <cmath>
#include <cstring>

#include "cold/cold_head.hpp"

namespace entropykv {
namespace {

struct Header {
    std::int32_t n_pages;
    std::int32_t open;
    std::int32_t n_open;
};

Header header_of(const std::byte* state) {
    Header header;
    std::memcpy(&header, state, sizeof header);
    return header;
}

ColdRecord record_in(const std::byte* state, int i) {
    ColdRecord record;
    std::memcpy(&record, state + sizeof(Header) + static_cast<std::size_t>(i) * sizeof record,
                sizeof record);
    return record;
}

bool has_records(const std::byte* state, int page, int per_page) {
    for (int i = page * per_page; i < (page + 1) * per_page; ++i)
        if (record_in(state, i).position != kDead) return true;
    return false;
}

int count_stored(const std::byte* state, int per_page) {
    const Header header = header_of(state);
    int n = 0;
    for (int page = 0; page < header.n_pages; ++page)
        if (page != header.open && has_records(state, page, per_page)) ++n;
    return n;
}

const char* record_problem(const ColdRecord& record, std::vector<bool>& seen) {
    if (record.position == kDead)
        return record.frozen() ? "a frozen entry without a position" : nullptr;
    const auto position = static_cast<std::size_t>(record.position);
    if (position >= seen.size()) return "a frozen position that was never read";  // or negative
    if (!std::isfinite(record.importance) || record.importance < 0.0f)
        return "an impossible importance of a frozen entry";
    if (record.frozen_at < kActive || record.frozen_at >= static_cast<std::int32_t>(seen.size()))
        return "a time of freezing that never was";
    if (!record.frozen()) return nullptr;
    if (record.due <= record.frozen_at) return "a timer that had ended";
    if (seen[position]) return "a position twice";
    seen[position] = true;
    return nullptr;
}

}  // namespace

std::size_t ColdHead::state_bytes() const {
    const std::size_t of_records = records_.size() * sizeof(ColdRecord);
    return sizeof(Header) + of_records + (open_ == kNone ? 0 : layout_->page.bytes) +
           n_stored_ * layout_->codec.bytes();
}

std::size_t ColdHead::empty_state_bytes() { return sizeof(Header); }

void ColdHead::save_empty(std::byte* state) {
    const Header header{0, kNone, 0};
    std::memcpy(state, &header, sizeof header);
}

bool ColdHead::save(std::byte* state) const {
    const Header header{n_pages(), open_, n_open_};
    std::memcpy(state, &header, sizeof header);
    state += sizeof header;
    for (std::size_t i = 0; i < records_.size(); ++i, state += sizeof(ColdRecord)) {
        const ColdRecord record = records_.get(i);
        std::memcpy(state, &record, sizeof record);
    }
    if (open_ != kNone) {
        std::memset(state, 0, layout_->page.bytes);
        for (int slot = 0; slot < n_open_; ++slot)
            copy_entry(layout_->page, open_rows_.data(), slot, state, slot);
        state += layout_->page.bytes;
    }
    AlignedBytes packed(storage_->page_bytes());
    for (const Page& page : pages_) {
        if (!page.stored) continue;
        const std::byte* rows = storage_->read(page.place, packed.data());
        if (rows == nullptr) return false;
        std::memcpy(state, rows, layout_->codec.bytes());
        state += layout_->codec.bytes();
    }
    return true;
}

std::string ColdHead::state_problem(const std::byte* state, std::size_t size,
                                    std::vector<bool>& seen) const {
    constexpr const char* kSize = "frozen entries of another size";
    if (size < sizeof(Header)) return kSize;
    const Header header = header_of(state);
    const std::size_t of_page = index(per_page()) * sizeof(ColdRecord);
    if (header.n_pages < 0 || index(header.n_pages) > (size - sizeof header) / of_page)
        return kSize;
    const bool open = header.open != kNone;
    if (open ? header.open < 0 || header.open >= header.n_pages || header.n_open < 0 ||
                   header.n_open > per_page()
             : header.n_open != 0)
        return "an impossible page of frozen entries";
    for (int i = 0; i < header.n_pages * per_page(); ++i) {
        const ColdRecord record = record_in(state, i);
        if (const char* problem = record_problem(record, seen)) return problem;
        if (record.position != kDead && i / per_page() == header.open &&
            i % per_page() >= header.n_open)
            return "a frozen entry that was never written";
    }
    const std::size_t expected = sizeof header + index(header.n_pages) * of_page +
                                 (open ? layout_->page.bytes : 0) +
                                 index(count_stored(state, per_page())) * layout_->codec.bytes();
    return size == expected ? "" : kSize;
}

bool ColdHead::is_home(const std::byte* state, int record, int per_page, std::int32_t position) {
    if (record < 0 || record >= header_of(state).n_pages * per_page) return false;
    const ColdRecord found = record_in(state, record);
    return !found.frozen() && found.position == position;
}

void ColdHead::begin_load(const std::byte* state, int n_new) {
    prepare(header_of(state).n_pages * per_page() + n_new);
    const std::size_t n = index(count_stored(state, per_page()));
    while (spare_.size() < n + index(n_new / per_page() + 2)) spare_.push_back(storage_->take());
}

int ColdHead::load(const std::byte* state, const KernelTable& kernels, std::byte* buffer) {
    const Header header = header_of(state);
    truncate(0);
    pages_.assign(index(header.n_pages), Page{});
    records_.resize(pages_.size() * index(per_page()));
    free_pages_.clear();
    open_ = header.open;
    n_open_ = header.n_open;
    for (int i = 0; i < n_records(); ++i) {
        ColdRecord record = record_in(state, i);
        if (!record.frozen()) record.due = kNever;
        records_.set(index(i), record);
    }
    const std::byte* rows = state + sizeof header + records_.size() * sizeof(ColdRecord);
    if (open_ != kNone) {
        std::memcpy(open_rows_.data(), rows, layout_->page.bytes);
        rows += layout_->page.bytes;
    }
    for (int number = n_pages() - 1; number >= 0; --number)
        if (number != open_ && !has_records(state, number, per_page()))
            free_pages_.push_back(number);
    for (int number = 0; number < n_pages(); ++number) {
        count_records(number);
        if (number == open_ || pages_[index(number)].n_records == 0) continue;
        std::memcpy(packed_.data(), rows, layout_->codec.bytes());
        rows += layout_->codec.bytes();
        layout_->codec.unpack(packed_.data(), kernels, buffer);
        layout_->sketch.draw(layout_->page, buffer, keys_.data(), sketch_of(number));
        store(number, packed_.data());
    }
    const int n_frozen = n_frozen_;
    while (is_limited() && n_stored_ > most_pages_) drop_page(least_page(1.0f, 0));
    return n_frozen - n_frozen_;
}

void ColdHead::count_records(int number) {
    Page& page = pages_[index(number)];
    page = Page{};
    for (int i = number * per_page(); i < (number + 1) * per_page(); ++i) {
        if (position(i) == kDead) continue;
        ++page.n_records;
        if (!frozen(i)) continue;
        ++page.n_frozen;
        ++n_frozen_;
    }
}

}  // namespace entropykv
