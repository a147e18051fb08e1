#include "store/recall.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "platform/prefetch.hpp"
#include "platform/scratch.hpp"

namespace entropykv {
namespace {

constexpr int kRowsAtOnce = 4;  // queries whose logits are held at a time
// An entry to which each query gives a smaller share of its attention is not worth a copy.
constexpr float kLeastShare = 0.003f;
// A frozen entry must be needed this many times as much as the entry that it replaces.
constexpr float kAdvantage = 1.25f;

// An entry is needed as much as the queries' squared shares of attention say, which is how measure
// mass scores entries, too. Shares are relative to what the head holds.
constexpr Statistic kNeed = Statistic::squared_probability;

}  // namespace

void Recall::size(std::size_t n, std::size_t page_entries, std::size_t page_bytes) {
    // Kernels write logits for all slots of a page, even unused ones of the last page.
    fit(logits_, std::max(index(kRowsAtOnce) * (n + page_entries),
                          kMostQueryRows * std::max<std::size_t>(page_entries, kGroupEntries)));
    fit(masses_, kMostQueryRows);
    fit(active_needs_, n);
    fit(victims_, n);
    fit(incoming_, index(kMostRecalled));
    if (copies_.size() == 0)
        copies_ = AlignedBytes(index(kMostRecalled / kPageEntries) * page_bytes);
}

void Recall::size_for_records(std::size_t n) {
    if (needs_.size() < n) needs_.resize(n + n / 4);
    if (best_.size() < n) best_.resize(n + n / 4);
}

std::size_t Recall::bytes() const {
    return bytes_of(logits_) + bytes_of(masses_) + bytes_of(active_needs_) + bytes_of(victims_) +
           bytes_of(needs_) + bytes_of(best_) + bytes_of(incoming_) + copies_.size();
}

// Returns the share of a query's attention that brings an entry back. Under a schedule it is high
// enough that the entry would not be frozen again at once.
float Recall::least_share(const Head& head) const noexcept {
    if (!common_.schedule || !common_.measure().of_shares) return kLeastShare;
    return std::max(kLeastShare, common_.schedule->threshold / static_cast<float>(head.count()));
}

// Computes for every query the sum of e^logit over the held entries (as a logarithm), and how much
// the queries need each of these entries.
void Recall::weigh_active(const Head& head, const QueryRows& queries) noexcept {
    const PageLayout& layout = head.layout();
    float* needs = active_needs_.data();
    std::fill_n(needs, head.count(), 0.0f);
    for (int first_row = 0; first_row < queries.n; first_row += kRowsAtOnce) {
        const int rows = std::min(kRowsAtOnce, queries.n - first_row);
        float* logits = logits_.data();
        const int stride = static_cast<int>(logits_.size()) / kRowsAtOnce;
        head.for_each_page({}, [&](std::byte* page, int n, int first) {
            if (first + n < head.count())
                prefetch(head.pages[first / n + 1] + layout.k_offset, layout.k_bytes());
            common_.kernels->products(layout, page, queries.row(first_row), rows, logits + first,
                                      stride);
        });
        for (int r = 0; r < rows; ++r, logits += stride) {
            for (int i = 0; queries.adjusts() && i < head.count(); ++i)
                logits[i] = queries.adjusted(first_row + r, logits[i], head.position(i));
            const float mass = common_.kernels->log_sum(logits, head.count());
            masses_[index(first_row + r)] = mass;
            if (!std::isfinite(mass)) continue;  // a query that is not a number needs nothing
            common_.kernels->logits_observe(logits, head.count(), kNeed, mass, 1.0f, needs);
        }
    }
}

// Computes how much the queries need each frozen entry, by record.
void Recall::weigh_frozen(const Head& head, const QueryRows& queries) noexcept {
    const ColdHead& cold = *head.frozen.cold;
    const int per_page = head.layout().entries;
    float* logits = logits_.data();
    std::fill_n(needs_.begin(), cold.n_records(), 0.0f);
    for (int page = 0; page < cold.n_pages(); ++page) {
        if (cold.n_frozen(page) == 0) continue;
        const std::int32_t* positions = cold.records().positions(page);
        const std::int32_t* frozen_at = cold.records().frozen_at(page);
        float* needs = needs_.data() + page * per_page;
        cold.products(*common_.kernels, page, queries, logits);
        for (int r = 0; r < queries.n; ++r) {
            if (!std::isfinite(masses_[index(r)])) continue;
            float* of_query = logits + r * per_page;
            for (int slot = 0; queries.adjusts() && slot < per_page; ++slot)
                of_query[slot] = queries.adjusted(r, of_query[slot], positions[slot]);
            common_.kernels->logits_observe(of_query, per_page, kNeed, masses_[index(r)], 1.0f,
                                            needs);
        }
        for (int slot = 0; slot < per_page; ++slot)
            needs[slot] = frozen_at[slot] != kActive ? needs[slot] : 0.0f;
    }
}

void Recall::run(Head& head, int n_staged, const QueryRows& queries, std::int32_t now,
                 std::byte* buffer) noexcept {
    if (head.frozen.n_now() == 0 || head.count() == 0) return;
    room_ = std::clamp(head.room() - head.count() - n_staged, 0, kMostRecalled);
    if (room_ == 0 && find_victims(head, now - n_staged) == 0)
        return;  // no entry could come back, whatever the queries need
    const auto start = std::chrono::steady_clock::now();
    weigh_active(head, queries);
    weigh_frozen(head, queries);
    const int n_incoming = take_best(head, now - n_staged, buffer);
    if (n_incoming > 0) exchange(head, n_incoming, now);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    common_.cold_nanoseconds.fetch_add(
        std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
        std::memory_order_relaxed);
}

// Lists in victims_ the held entries that recalled ones may replace, those that are not protected,
// and returns how many there are.
int Recall::find_victims(const Head& head, std::int32_t newest) noexcept {
    const Protection protection = common_.protection_of(head, newest);
    int n = 0;
    for (int i = 0; i < head.count(); ++i)
        if (!protection.covers(head.position(i), newest)) victims_[index(n++)] = i;
    return n;
}

// Selects the frozen entries that the queries need most, at most kMostRecalled: as many as the head
// has room for, and more as long as each is needed more than the entry that it replaces.
int Recall::take_best(const Head& head, std::int32_t newest, std::byte* buffer) noexcept {
    const float least = least_share(head);
    std::int32_t* best = best_.data();
    int n = 0;
    for (int i = 0; i < head.frozen.cold->n_records(); ++i)
        if (needs_[index(i)] >= least * least) best[n++] = i;
    if (n > room_) n = choose_exchanges(head, n, newest);
    return find_rows(head, n, buffer);
}

// Of n frozen entries that should come back, selects those that fit into free room or are needed
// more than a held entry. Afterwards victims_ is sorted by need.
int Recall::choose_exchanges(const Head& head, int n, std::int32_t newest) noexcept {
    const float* needs = needs_.data();
    const float* active = active_needs_.data();
    std::int32_t* best = best_.data();
    std::int32_t* victims = victims_.data();
    const int n_victims = find_victims(head, newest);
    const int most = std::min({n - room_, n_victims, kMostRecalled - room_});
    const auto needed_more = [&](int a, int b) {
        return needs[a] > needs[b] || (needs[a] == needs[b] && a < b);
    };
    const auto needed_less = [&](int a, int b) {
        return active[a] < active[b] || (active[a] == active[b] && a < b);
    };
    std::partial_sort(best, best + room_ + most, best + n, needed_more);
    std::partial_sort(victims, victims + most, victims + n_victims, needed_less);
    for (n = room_; n < room_ + most; ++n)
        if (needs[best[n]] < kAdvantage * active[victims[n - room_]]) break;
    std::sort(best, best + n);
    return n;
}

// Finds the rows of the n selected records. Rows that an eviction may overwrite before they are
// used are copied. Returns how many could be read.
int Recall::find_rows(const Head& head, int n, std::byte* buffer) noexcept {
    const ColdHead& cold = *head.frozen.cold;
    const PageLayout& layout = head.layout();
    const std::byte* rows = nullptr;
    int of_page = ColdHead::kNone;
    int n_found = 0;
    for (int i = 0; i < n; ++i) {
        const int record = best_[index(i)];
        const int page = layout.page_of(record);
        if (page != of_page) rows = cold.read(page, buffer);
        of_page = page;
        if (rows == nullptr) continue;
        Incoming& entry = incoming_[index(n_found)];
        entry = {record, rows, {}};
        if (!cold.stays(page)) {
            entry.rows = nullptr;
            cold.take(rows, record, *common_.kernels, copied_page(layout, n_found),
                      n_found % layout.entries);
        }
        ++n_found;
    }
    return n_found;
}

// Stores the found entries: first into free room, then in place of victims.
void Recall::exchange(Head& head, int n_incoming, std::int32_t now) noexcept {
    ColdHead& cold = *head.frozen.cold;
    const PageLayout& layout = head.layout();
    for (int n = 0; n < n_incoming; ++n) {
        Incoming& entry = incoming_[index(n)];
        entry.record = cold.record(entry.record_number);
        cold.restore(entry.record_number);
    }
    head.frozen.n_recalled += index(n_incoming);
    const int n_added = std::min(n_incoming, room_);
    std::int32_t* victims = victims_.data();
    std::sort(victims, victims + (n_incoming - n_added));
    for (int n = 0; n < n_incoming; ++n) {
        const int target = n < n_added ? head.add_place() : victims[n - n_added];
        if (n >= n_added) replace_victim(head, target, n, n_incoming, now);
        const Incoming& entry = incoming_[index(n)];
        const Slot slot = head.place(target);
        if (entry.rows != nullptr)
            cold.take(entry.rows, entry.record_number, *common_.kernels, slot.page, slot.index);
        else
            copy_rows(layout, copied_page(layout, n), n % layout.entries, slot.page, slot.index);
        freezer_.note_restored(head, target, entry.record, entry.record_number, now);
    }
}

// Freezes a victim; incoming entries on a page of records that this drops lose their numbers.
void Recall::replace_victim(Head& head, int victim, int next, int n_incoming,
                            std::int32_t now) noexcept {
    const int dropped = freezer_.freeze(head, victim, head.place(victim), now, kNever,
                                        head.frozen.detections_of(victim, head.count()));
    for (; dropped != ColdHead::kNone && next < n_incoming; ++next) {
        int& record_number = incoming_[index(next)].record_number;
        if (FrozenEntries::in_page(record_number, dropped, head.layout()))
            record_number = ColdHead::kNone;
    }
}

}  // namespace entropykv
