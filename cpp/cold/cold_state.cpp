#include "cold/cold_state.hpp"

#include <cmath>
#include <cstring>

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
    // This also catches negative positions.
    if (position >= seen.size()) return "a frozen position that was never read";
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

std::size_t ColdSaver::bytes() const {
    const std::size_t of_records = ColdHead::index(head_.n_records()) * sizeof(ColdRecord);
    return sizeof(Header) + of_records +
           (head_.open_ == ColdHead::kNone ? 0 : head_.cold_->page.bytes) +
           head_.n_stored_ * head_.cold_->codec.bytes();
}

std::size_t ColdSaver::empty_bytes() { return sizeof(Header); }

void ColdSaver::save_empty(std::byte* state) {
    const Header header{0, ColdHead::kNone, 0};
    std::memcpy(state, &header, sizeof header);
}

bool ColdSaver::save(std::byte* state) const {
    const Header header{head_.n_pages(), head_.open_, head_.n_open_};
    std::memcpy(state, &header, sizeof header);
    state += sizeof header;
    for (int i = 0; i < head_.n_records(); ++i, state += sizeof(ColdRecord)) {
        const ColdRecord record = head_.record(i);
        std::memcpy(state, &record, sizeof record);
    }
    if (head_.open_ != ColdHead::kNone) {
        std::memset(state, 0, head_.cold_->page.bytes);
        for (int slot = 0; slot < head_.n_open_; ++slot)
            copy_entry(head_.cold_->page, head_.open_rows_.data(), slot, state, slot);
        state += head_.cold_->page.bytes;
    }
    AlignedBytes packed(head_.storage_->page_bytes());
    for (const ColdHead::Page& page : head_.pages_) {
        if (!page.stored) continue;
        const std::byte* rows = head_.storage_->read(page.place, packed.data());
        if (rows == nullptr) return false;
        std::memcpy(state, rows, head_.cold_->codec.bytes());
        state += head_.cold_->codec.bytes();
    }
    return true;
}

std::string ColdSaver::problem(const std::byte* state, std::size_t size,
                               std::vector<bool>& seen) const {
    constexpr const char* kSize = "frozen entries of another size";
    if (size < sizeof(Header)) return kSize;
    const Header header = header_of(state);
    const std::size_t of_page = ColdHead::index(head_.per_page()) * sizeof(ColdRecord);
    if (header.n_pages < 0 || ColdHead::index(header.n_pages) > (size - sizeof header) / of_page)
        return kSize;
    const bool open = header.open != ColdHead::kNone;
    if (open ? header.open < 0 || header.open >= header.n_pages || header.n_open < 0 ||
                   header.n_open > head_.per_page()
             : header.n_open != 0)
        return "an impossible page of frozen entries";
    for (int i = 0; i < header.n_pages * head_.per_page(); ++i) {
        const ColdRecord record = record_in(state, i);
        if (const char* problem = record_problem(record, seen)) return problem;
        if (record.position != kDead && i / head_.per_page() == header.open &&
            i % head_.per_page() >= header.n_open)
            return "a frozen entry that was never written";
    }
    const std::size_t expected =
        sizeof header + ColdHead::index(header.n_pages) * of_page +
        (open ? head_.cold_->page.bytes : 0) +
        ColdHead::index(count_stored(state, head_.per_page())) * head_.cold_->codec.bytes();
    return size == expected ? "" : kSize;
}

bool ColdSaver::is_restored_record(const std::byte* state, int record, int per_page,
                                   std::int32_t position) {
    if (record < 0 || record >= header_of(state).n_pages * per_page) return false;
    const ColdRecord found = record_in(state, record);
    return !found.frozen() && found.position == position;
}

void ColdLoader::begin(const std::byte* state, int n_new) {
    head_.prepare(header_of(state).n_pages * head_.per_page() + n_new);
    const std::size_t n = ColdHead::index(count_stored(state, head_.per_page()));
    while (head_.spare_.size() < n + ColdHead::index(n_new / head_.per_page() + 2))
        head_.spare_.push_back(head_.storage_->take());
}

int ColdLoader::load(const std::byte* state, const ImportanceSettings& settings,
                     const KernelTable& kernels, std::byte* buffer) {
    const Header header = header_of(state);
    head_.truncate(0);
    head_.pages_.assign(ColdHead::index(header.n_pages), ColdHead::Page{});
    head_.records_.resize(header.n_pages);
    head_.free_pages_.clear();
    head_.open_ = header.open;
    head_.n_open_ = header.n_open;
    for (int i = 0; i < head_.n_records(); ++i) {
        ColdRecord record = record_in(state, i);
        if (!record.frozen()) record.due = kNever;
        head_.records_.set(i, record);
    }
    const std::byte* rows =
        state + sizeof header + ColdHead::index(head_.n_records()) * sizeof(ColdRecord);
    if (head_.open_ != ColdHead::kNone) {
        std::memcpy(head_.open_rows_.data(), rows, head_.cold_->page.bytes);
        rows += head_.cold_->page.bytes;
    }
    for (int number = head_.n_pages() - 1; number >= 0; --number)
        if (number != head_.open_ && !has_records(state, number, head_.per_page()))
            head_.free_pages_.push_back(number);
    for (int number = 0; number < head_.n_pages(); ++number) {
        count_records(number);
        if (number == head_.open_ || head_.pages_[ColdHead::index(number)].n_records == 0) continue;
        std::memcpy(head_.packed_.data(), rows, head_.cold_->codec.bytes());
        rows += head_.cold_->codec.bytes();
        head_.cold_->codec.unpack(head_.packed_.data(), kernels, buffer);
        head_.cold_->sketch.draw(head_.cold_->page, buffer, head_.keys_.data(),
                                 head_.sketch_of(number));
        head_.store(number, head_.packed_.data());
    }
    const int n_frozen = head_.n_frozen_;
    ImportanceSettings as_saved = settings;
    as_saved.decay = 1.0f;
    while (head_.is_limited() && head_.n_stored_ > head_.most_pages_)
        head_.drop_page(head_.least_page(as_saved, 0));
    return n_frozen - head_.n_frozen_;
}

void ColdLoader::count_records(int number) {
    ColdHead::Page& page = head_.pages_[ColdHead::index(number)];
    page = ColdHead::Page{};
    for (int i = number * head_.per_page(); i < (number + 1) * head_.per_page(); ++i) {
        if (head_.position(i) == kDead) continue;
        ++page.n_records;
        if (!head_.frozen(i)) continue;
        ++page.n_frozen;
        ++head_.n_frozen_;
    }
}

}  // namespace entropykv
