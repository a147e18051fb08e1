// Recall by relevance: frozen entries that the queries of a step would attend to come back before
// the head is attended to. Their sketches say which; storage is read only for those that come.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "platform/prefetch.hpp"
#include "platform/scratch.hpp"
#include "store/head_store.hpp"

namespace entropykv {
namespace {

constexpr int kRowsAtOnce = 4;         // queries whose logits are held
constexpr float kLeastShare = 0.003f;  // of a query's attention: what is worth a copy
constexpr float kAdvantage = 1.25f;    // of need, over that of the entry whose place is taken

// How much queries need an entry: their squared shares of attention, as what is kept otherwise is
// measured. A share is of what the head holds.
constexpr Statistic kNeed = Statistic::squared_probability;

}  // namespace

// Room to look through a head of n entries.
void HeadStore::size_for_recall(Workspace& workspace, std::size_t n) const {
    if (!cold_) return;
    std::size_t entries = 0;
    for (const Layer& layer : layers_) entries = std::max(entries, index(layer.layout.entries));
    // All slots of every page, also of the last one.
    fit(workspace.logits, std::max(index(kRowsAtOnce) * (n + entries),
                                   kMostQueryRows * std::max<std::size_t>(entries, kGroupEntries)));
    fit(workspace.masses, kMostQueryRows);
    fit(workspace.active_needs, n);
    fit(workspace.victims, n);
    fit(workspace.incoming, index(kMostRecalled));
    if (workspace.page_read.size() == 0) {
        const std::size_t n_aside = index(kMostRecalled / kPageEntries);
        workspace.page_read = AlignedBytes(cold_->page_bytes() + page_bytes());
        workspace.aside = AlignedBytes(n_aside * page_bytes());
    }
}

// For so many pages of cold storage.
void HeadStore::size_for_frozen(const Layer& layer, std::size_t n_pages) {
    const std::size_t entries = n_pages * index(layer.layout.entries);
    for (Workspace& workspace : workspaces_) {
        if (workspace.needs.size() >= entries) continue;
        workspace.needs.resize(2 * entries);
        workspace.best.resize(2 * entries);
    }
}

// Entries that recall may add to what a head holds, so that the micro-batch still fits.
int HeadStore::room_to_recall(const Layer& layer, const Head& head, int n_staged) const {
    const int per_page = layer.layout.entries;
    const int room = std::min(head.budget, static_cast<int>(head.pages.size()) * per_page);
    return std::clamp(room - head.count - n_staged, 0, kMostRecalled);
}

// Entries that recall may bring back to a head in one step, into room or in exchange: what
// prepare_cold() and the workspaces have room for.
int HeadStore::most_recalled(const Head& head) {
    return head.cold ? std::min(head.cold->n_frozen(), kMostRecalled) : 0;
}

// The share of a query's attention that brings an entry back. What the schedule would detect again
// does not come.
float HeadStore::least_share(const Head& head) const noexcept {
    if (!schedule_ || !settings_.importance.measure().of_shares) return kLeastShare;
    return std::max(kLeastShare, schedule_->threshold / static_cast<float>(head.count));
}

// What every query attends to now: its mass, and how much the entries that the head holds are
// needed.
void HeadStore::weigh_active(const Layer& layer, const Head& head, const QueryRows& queries,
                             Workspace& workspace) const noexcept {
    float* needs = workspace.active_needs.data();
    std::fill_n(needs, head.count, 0.0f);
    for (int first_row = 0; first_row < queries.n; first_row += kRowsAtOnce) {
        const int rows = std::min(kRowsAtOnce, queries.n - first_row);
        float* logits = workspace.logits.data();
        const int stride = static_cast<int>(workspace.logits.size()) / kRowsAtOnce;
        over_pages(layer, head, 0, 0, [&](std::byte* page, int n, int first) {
            if (first + n < head.count)
                ask_for(head.pages[index(first / n + 1)] + layer.layout.k_offset,
                        layer.layout.k_bytes());
            kernels_->products(layer.layout, page, queries.row(first_row), rows, logits + first,
                               stride);
        });
        for (int r = 0; r < rows; ++r, logits += stride) {
            for (int i = 0; queries.adjusts() && i < head.count; ++i) {
                const Slot slot = stored_slot(layer, head, i);
                const std::int32_t position = layer.layout.positions(slot.page)[slot.index];
                logits[i] = queries.adjusted(first_row + r, logits[i], position);
            }
            const float mass = kernels_->log_sum(logits, head.count);
            workspace.masses[index(first_row + r)] = mass;
            if (!std::isfinite(mass)) continue;  // a query that is no number needs nothing
            kernels_->logits_observe(logits, head.count, kNeed, mass, 1.0f, needs);
        }
    }
}

// How much each frozen entry is needed, by record.
void HeadStore::weigh_frozen(const Layer& layer, const Head& head, const QueryRows& queries,
                             Workspace& workspace) const noexcept {
    const int per_page = layer.layout.entries;
    float* logits = workspace.logits.data();
    std::fill_n(workspace.needs.begin(), head.cold->n_records(), 0.0f);
    for (int page = 0; page < head.cold->n_pages(); ++page) {
        if (head.cold->n_frozen(page) == 0) continue;
        const int first_record = page * per_page;
        float* needs = workspace.needs.data() + first_record;
        head.cold->products(*kernels_, page, queries, logits);
        for (int r = 0; r < queries.n; ++r) {
            if (!std::isfinite(workspace.masses[index(r)])) continue;
            float* of_query = logits + r * per_page;
            for (int slot = 0; queries.adjusts() && slot < per_page; ++slot)
                of_query[slot] =
                    queries.adjusted(r, of_query[slot], head.cold->position(first_record + slot));
            kernels_->logits_observe(of_query, per_page, kNeed, workspace.masses[index(r)], 1.0f,
                                     needs);
        }
        for (int slot = 0; slot < per_page; ++slot)
            needs[slot] = head.cold->frozen(first_record + slot) ? needs[slot] : 0.0f;
    }
}

void HeadStore::recall(int layer_index, int head_index, int n_staged, const QueryRows& queries,
                       std::int32_t now, int workspace_index) noexcept {
    const Layer& layer = layers_[index(layer_index)];
    Head& head = layers_[index(layer_index)].heads[index(head_index)];
    Workspace& workspace = workspaces_[index(workspace_index)];
    if (!head.cold || head.cold->n_frozen() == 0 || head.count == 0) return;
    workspace.room = room_to_recall(layer, head, n_staged);
    if (workspace.room == 0 && find_victims(layer, head, now - n_staged, workspace) == 0)
        return;  // nothing could come back, whatever there is
    const auto start = std::chrono::steady_clock::now();
    weigh_active(layer, head, queries, workspace);
    const float least = least_share(head);
    weigh_frozen(layer, head, queries, workspace);
    const int n_incoming = take_best(layer, head, least, now - n_staged, workspace);
    if (n_incoming > 0) exchange(layer, head, n_incoming, now, workspace);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    cold_nanoseconds_.fetch_add(
        std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
        std::memory_order_relaxed);
}

// The entries of a head that may give their places away.
int HeadStore::find_victims(const Layer& layer, const Head& head, std::int32_t newest,
                            Workspace& workspace) const noexcept {
    const Protection protection = protection_of(layer, head, newest);
    int n = 0;
    for (int i = 0; i < head.count; ++i) {
        const Slot slot = stored_slot(layer, head, i);
        if (!protection.covers(layer.layout.positions(slot.page)[slot.index], newest))
            workspace.victims[index(n++)] = i;
    }
    return n;
}

// What is needed most of what is frozen: as much as the head has room for, and then as long as it
// is needed more than what it takes the place of, kMostRecalled at most. Victims are in the order
// of their need then.
int HeadStore::take_best(const Layer& layer, Head& head, float least, std::int32_t newest,
                         Workspace& workspace) const noexcept {
    std::int32_t* best = workspace.best.data();
    int n = 0;
    for (int i = 0; i < head.cold->n_records(); ++i)
        if (workspace.needs[index(i)] >= least * least) best[n++] = i;
    if (n > workspace.room) {
        const float* needs = workspace.needs.data();
        const float* active = workspace.active_needs.data();
        std::int32_t* victims = workspace.victims.data();
        const int n_victims = find_victims(layer, head, newest, workspace);
        const int most = std::min({n - workspace.room, n_victims, kMostRecalled - workspace.room});
        const auto rather = [&](int a, int b) {
            return needs[a] > needs[b] || (needs[a] == needs[b] && a < b);
        };
        const auto sooner = [&](int a, int b) {
            return active[a] < active[b] || (active[a] == active[b] && a < b);
        };
        std::partial_sort(best, best + workspace.room + most, best + n, rather);
        std::partial_sort(victims, victims + most, victims + n_victims, sooner);
        for (n = workspace.room; n < workspace.room + most; ++n)
            if (needs[best[n]] < kAdvantage * active[victims[n - workspace.room]]) break;
        std::sort(best, best + n);
    }
    return find_rows(layer, head, n, workspace);
}

// Where the first n of what is needed most lies, or a copy of it: what is frozen meanwhile may take
// the place of other pages. Returns how many could be read.
int HeadStore::find_rows(const Layer& layer, Head& head, int n,
                         Workspace& workspace) const noexcept {
    const int per_page = layer.layout.entries;
    const std::byte* rows = nullptr;
    int of_page = ColdHead::kNone;
    int n_found = 0;
    for (int i = 0; i < n; ++i) {
        const int record = workspace.best[index(i)];
        const int page = layer.layout.page_of(record);
        if (page != of_page) rows = head.cold->read(page, workspace.page_read.data());
        of_page = page;
        if (rows == nullptr) continue;
        Incoming& entry = workspace.incoming[index(n_found)];
        entry = {record, rows, {}};
        if (!head.cold->stays(page)) {
            entry.rows = nullptr;
            head.cold->take(rows, record, *kernels_, aside(layer, n_found, workspace),
                            n_found % per_page);
        }
        ++n_found;
    }
    return n_found;
}

// The entries that were found: into the room that there is, then for the victims.
void HeadStore::exchange(const Layer& layer, Head& head, int n_incoming, std::int32_t now,
                         Workspace& workspace) noexcept {
    for (int n = 0; n < n_incoming; ++n) {
        Incoming& entry = workspace.incoming[index(n)];
        entry.record = head.cold->record(entry.home);
        head.cold->restore(entry.home);
    }
    head.n_recalled += index(n_incoming);
    const int n_added = std::min(n_incoming, workspace.room);
    std::int32_t* victims = workspace.victims.data();
    std::sort(victims, victims + (n_incoming - n_added));
    for (int n = 0; n < n_incoming; ++n) {
        const int target = n < n_added ? head.count++ : victims[n - n_added];
        if (n >= n_added) give_place(layer, head, target, n, n_incoming, now, workspace);
        const Incoming& entry = workspace.incoming[index(n)];
        const Slot slot = stored_slot(layer, head, target);
        if (entry.rows != nullptr)
            head.cold->take(entry.rows, entry.home, *kernels_, slot.page, slot.index);
        else
            copy_rows(layer.layout, aside(layer, n, workspace), n % layer.layout.entries, slot.page,
                      slot.index);
        note_restored(layer, head, target, entry.record, entry.home, now);
    }
}

// Freezes a victim. The records of what comes next may be dropped for it.
void HeadStore::give_place(const Layer& layer, Head& head, int victim, int next, int n_incoming,
                           std::int32_t now, Workspace& workspace) noexcept {
    const int dropped = freeze_entry(layer, head, victim, stored_slot(layer, head, victim), now,
                                     kNever, detections_of(head, victim));
    for (; dropped != ColdHead::kNone && next < n_incoming; ++next) {
        int& home = workspace.incoming[index(next)].home;
        if (in_page(home, dropped, layer)) home = ColdHead::kNone;
    }
}

}  // namespace entropykv
