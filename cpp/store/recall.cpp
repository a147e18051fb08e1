#include "store/recall.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "platform/prefetch.hpp"
#include "platform/scratch.hpp"

namespace entropykv {
namespace {

constexpr int kRowsAtOnce = 4;         // queries whose logits are held
constexpr float kLeastShare = 0.003f;  // of a query's attention: what is worth a copy
constexpr float kAdvantage = 1.25f;    // of need, over that of the entry whose place is taken

// How much queries need an entry: their squared shares of attention, as what is kept otherwise is
// measured. A share is of what the head holds.
constexpr Statistic kNeed = Statistic::squared_probability;

}  // namespace

void Recall::size(std::size_t n, std::size_t page_entries, std::size_t page_bytes) {
    // All slots of every page, also of the last one.
    fit(logits_, std::max(index(kRowsAtOnce) * (n + page_entries),
                          kMostQueryRows * std::max<std::size_t>(page_entries, kGroupEntries)));
    fit(masses_, kMostQueryRows);
    fit(active_needs_, n);
    fit(victims_, n);
    fit(incoming_, index(kMostRecalled));
    if (aside_.size() == 0) aside_ = AlignedBytes(index(kMostRecalled / kPageEntries) * page_bytes);
}

void Recall::size_for_records(std::size_t n) {
    if (needs_.size() < n) needs_.resize(n + n / 4);
    if (best_.size() < n) best_.resize(n + n / 4);
}

std::size_t Recall::bytes() const {
    return bytes_of(logits_) + bytes_of(masses_) + bytes_of(active_needs_) + bytes_of(victims_) +
           bytes_of(needs_) + bytes_of(best_) + bytes_of(incoming_) + aside_.size();
}

// The share of a query's attention that brings an entry back. What the schedule would detect again
// does not come.
float Recall::least_share(const Head& head) const noexcept {
    if (!common_.schedule || !common_.measure().of_shares) return kLeastShare;
    return std::max(kLeastShare, common_.schedule->threshold / static_cast<float>(head.count()));
}

// What every query attends to now: its mass, and how much the entries that the head holds are
// needed.
void Recall::weigh_active(const Head& head, const QueryRows& queries) noexcept {
    const PageLayout& layout = head.layout();
    float* needs = active_needs_.data();
    std::fill_n(needs, head.count(), 0.0f);
    for (int first_row = 0; first_row < queries.n; first_row += kRowsAtOnce) {
        const int rows = std::min(kRowsAtOnce, queries.n - first_row);
        float* logits = logits_.data();
        const int stride = static_cast<int>(logits_.size()) / kRowsAtOnce;
        head.over_pages({}, [&](std::byte* page, int n, int first) {
            if (first + n < head.count())
                ask_for(head.pages[first / n + 1] + layout.k_offset, layout.k_bytes());
            common_.kernels->products(layout, page, queries.row(first_row), rows, logits + first,
                                      stride);
        });
        for (int r = 0; r < rows; ++r, logits += stride) {
            for (int i = 0; queries.adjusts() && i < head.count(); ++i)
                logits[i] = queries.adjusted(first_row + r, logits[i], head.position(i));
            const float mass = common_.kernels->log_sum(logits, head.count());
            masses_[index(first_row + r)] = mass;
            if (!std::isfinite(mass)) continue;  // a query that is no number needs nothing
            common_.kernels->logits_observe(logits, head.count(), kNeed, mass, 1.0f, needs);
        }
    }
}

// How much each frozen entry is needed, by record.
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
        return;  // nothing could come back, whatever there is
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

// The entries of a head that may give their places away.
int Recall::find_victims(const Head& head, std::int32_t newest) noexcept {
    const Protection protection = common_.protection_of(head, newest);
    int n = 0;
    for (int i = 0; i < head.count(); ++i)
        if (!protection.covers(head.position(i), newest)) victims_[index(n++)] = i;
    return n;
}

// What is needed most of what is frozen: as much as the head has room for, and then as long as it
// is needed more than what it takes the place of, kMostRecalled at most.
int Recall::take_best(const Head& head, std::int32_t newest, std::byte* buffer) noexcept {
    const float least = least_share(head);
    std::int32_t* best = best_.data();
    int n = 0;
    for (int i = 0; i < head.frozen.cold->n_records(); ++i)
        if (needs_[index(i)] >= least * least) best[n++] = i;
    if (n > room_) n = choose_exchanges(head, n, newest);
    return find_rows(head, n, buffer);
}

// Of n entries that would come, those that there is room for, or an entry that is needed less.
// Victims are in the order of their need then.
int Recall::choose_exchanges(const Head& head, int n, std::int32_t newest) noexcept {
    const float* needs = needs_.data();
    const float* active = active_needs_.data();
    std::int32_t* best = best_.data();
    std::int32_t* victims = victims_.data();
    const int n_victims = find_victims(head, newest);
    const int most = std::min({n - room_, n_victims, kMostRecalled - room_});
    const auto rather = [&](int a, int b) {
        return needs[a] > needs[b] || (needs[a] == needs[b] && a < b);
    };
    const auto sooner = [&](int a, int b) {
        return active[a] < active[b] || (active[a] == active[b] && a < b);
    };
    std::partial_sort(best, best + room_ + most, best + n, rather);
    std::partial_sort(victims, victims + most, victims + n_victims, sooner);
    for (n = room_; n < room_ + most; ++n)
        if (needs[best[n]] < kAdvantage * active[victims[n - room_]]) break;
    std::sort(best, best + n);
    return n;
}

// Where the first n of what is needed most lies, or a copy of it: what is frozen meanwhile may take
// the place of other pages. Returns how many could be read.
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
            cold.take(rows, record, *common_.kernels, aside(layout, n_found),
                      n_found % layout.entries);
        }
        ++n_found;
    }
    return n_found;
}

// The entries that were found: into the room that there is, then for the victims.
void Recall::exchange(Head& head, int n_incoming, std::int32_t now) noexcept {
    ColdHead& cold = *head.frozen.cold;
    const PageLayout& layout = head.layout();
    for (int n = 0; n < n_incoming; ++n) {
        Incoming& entry = incoming_[index(n)];
        entry.record = cold.record(entry.home);
        cold.restore(entry.home);
    }
    head.frozen.n_recalled += index(n_incoming);
    const int n_added = std::min(n_incoming, room_);
    std::int32_t* victims = victims_.data();
    std::sort(victims, victims + (n_incoming - n_added));
    for (int n = 0; n < n_incoming; ++n) {
        const int target = n < n_added ? head.add_place() : victims[n - n_added];
        if (n >= n_added) give_place(head, target, n, n_incoming, now);
        const Incoming& entry = incoming_[index(n)];
        const Slot slot = head.place(target);
        if (entry.rows != nullptr)
            cold.take(entry.rows, entry.home, *common_.kernels, slot.page, slot.index);
        else
            copy_rows(layout, aside(layout, n), n % layout.entries, slot.page, slot.index);
        freezer_.note_restored(head, target, entry.record, entry.home, now);
    }
}

// Freezes a victim. The records of what comes next may be dropped for it.
void Recall::give_place(Head& head, int victim, int next, int n_incoming,
                        std::int32_t now) noexcept {
    const int dropped = freezer_.freeze(head, victim, head.place(victim), now, kNever,
                                        head.frozen.detections_of(victim, head.count()));
    for (; dropped != ColdHead::kNone && next < n_incoming; ++next) {
        int& home = incoming_[index(next)].home;
        if (FrozenEntries::in_page(home, dropped, head.layout())) home = ColdHead::kNone;
    }
}

}  // namespace entropykv
