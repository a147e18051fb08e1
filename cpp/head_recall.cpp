// Recall by relevance: frozen entries that the queries of a step would attend to come back before
// the head is attended to.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "head_store.hpp"

namespace entropykv {
namespace {

constexpr int kRowsAtOnce = 4;    // queries whose logits are held
constexpr int kCandidates = 128;  // stored pages that are looked into for one recall, at most
// Logs of shares of a query's attention: what makes an entry worth it, and how much less than it a
// page's clusters may promise.
const float kLeastGain = std::log(0.003f);
constexpr float kSlack = 2.5f;
constexpr int kFewPages = 32;  // that are all looked into: summaries would not save much

// Early: the hardware does not see one page coming after another.
void ask_for_keys(const PageLayout& layout, const std::byte* page) {
    constexpr std::size_t kLine = 64;
    const std::size_t bytes = layout.k_group_bytes() * PageLayout::index(layout.entries) /
                              PageLayout::index(kGroupEntries);
    for (std::size_t i = 0; page != nullptr && i < bytes; i += kLine)
        __builtin_prefetch(page + layout.k_offset + i);
}

}  // namespace

void HeadStore::size_for_recall(Workspace& workspace) const {
    if (!cold_) return;
    std::size_t entries = 0;
    for (const Layer& layer : layers_) entries = std::max(entries, index(layer.layout.entries));
    const std::size_t n = index(kCandidates + 1);
    // All slots of every page, also of the last one.
    workspace.logits.resize(
        std::max(index(kRowsAtOnce) * (workspace.scores.size() + entries),
                 kMostQueryRows * std::max<std::size_t>(entries, kGroupEntries)));
    workspace.masses.resize(kMostQueryRows);
    workspace.active_gains.resize(workspace.scores.size());
    workspace.pages.resize(n);
    workspace.rows.resize(n);
    workspace.gains.resize(n * entries);
    workspace.best.resize(n * entries);
    workspace.candidates = AlignedBytes(n * candidate_bytes());
    workspace.aside = AlignedBytes(n * pool_.page_bytes());
    workspace.incoming.resize(n * entries);
}

// Entries that recall may add to what a head holds, so that the micro-batch still fits.
int HeadStore::room_to_recall(const Layer& layer, const Head& head, int n_staged) const {
    const int per_page = layer.layout.entries;
    const int room = std::min(head.budget, static_cast<int>(head.pages.size()) * per_page);
    return std::clamp(room - head.count - n_staged, 0, (kCandidates + 1) * per_page);
}

int HeadStore::most_recalled(const Layer& layer, const Head& head) {
    if (!head.cold) return 0;
    return std::min(head.cold->n_frozen(), (kCandidates + 1) * layer.layout.entries);
}

// What an entry must gain to come back. What the schedule would detect again does not.
float HeadStore::least_gain_of(const Head& head) const noexcept {
    if (!schedule_ || settings_.importance.kind != ScoreKind::attention) return kLeastGain;
    return std::max(kLeastGain, std::log(schedule_->threshold / static_cast<float>(head.count)));
}

// What every query attends to now: its mass, and the gains of the entries that the head holds.
void HeadStore::weigh_active(const Layer& layer, const Head& head, const QueryRows& queries,
                             Workspace& workspace) const noexcept {
    float* gains = workspace.active_gains.data();
    std::fill_n(gains, head.count, kMaskedLogit);
    for (int first_row = 0; first_row < queries.n; first_row += kRowsAtOnce) {
        const int rows = std::min(kRowsAtOnce, queries.n - first_row);
        float* logits = workspace.logits.data();
        const int stride = static_cast<int>(workspace.logits.size()) / kRowsAtOnce;
        over_pages(layer, head, 0, 0, [&](std::byte* page, int n, int first) {
            if (first + n < head.count)
                ask_for_keys(layer.layout, head.pages[index(first / n + 1)]);
            kernels_->products(layer.layout, page, queries.row(first_row), rows, logits + first,
                               stride);
        });
        for (int r = 0; r < rows; ++r, logits += stride) {
            for (int i = 0; queries.softcap > 0.0f && i < head.count; ++i)
                logits[i] = soft_capped(logits[i], queries.softcap);
            for (int i = 0; queries.slopes != nullptr && i < head.count; ++i) {
                const Slot slot = stored_slot(layer, head, i);
                const std::int32_t position = layer.layout.positions(slot.page)[slot.index];
                logits[i] += queries.bias(first_row + r, position);
            }
            const float mass = kernels_->log_sum(logits, head.count);
            workspace.masses[index(first_row + r)] = mass;
            for (int i = 0; i < head.count; ++i) gains[i] = std::max(gains[i], logits[i] - mass);
        }
    }
}

// The pages that may hold what the queries need most, by their summaries; the open one first.
int HeadStore::find_candidates(const Head& head, const QueryRows& queries, float least_gain,
                               Workspace& workspace) const noexcept {
    const ColdHead& cold = *head.cold;
    const float* worth = workspace.worth.data();
    int* found = workspace.pages.data();
    int n = 0;
    if (cold.n_pages() <= kFewPages) {
        for (int page = 0; page < cold.n_pages(); ++page)
            if (cold.n_frozen(page) > 0) found[n++] = page;
        return n;
    }
    cold.estimate(*kernels_, queries, workspace.masses.data(), workspace.logits.data(),
                  workspace.worth.data());
    if (cold.open_page() != ColdHead::kNone && cold.n_frozen(cold.open_page()) > 0)
        found[n++] = cold.open_page();
    const int first = n;
    for (int page = 0; page < cold.n_pages(); ++page) {
        if (page == cold.open_page() || cold.n_frozen(page) == 0) continue;
        if (worth[page] < least_gain - kSlack) continue;
        if (n == first + kCandidates && worth[page] <= worth[found[n - 1]]) continue;
        int place = n < first + kCandidates ? n++ : n - 1;
        for (; place > first && worth[found[place - 1]] < worth[page]; --place)
            found[place] = found[place - 1];
        found[place] = page;
    }
    return n;
}

// Reads the candidates; the gain of each of their frozen entries.
void HeadStore::weigh_candidates(const Layer& layer, Head& head, const QueryRows& queries,
                                 int n_candidates, Workspace& workspace) const noexcept {
    const int per_page = layer.layout.entries;
    float* logits = workspace.logits.data();
    const auto read = [&](int c) {
        std::byte* buffer = workspace.candidates.data() + index(c) * candidate_bytes();
        workspace.rows[index(c)] = head.cold->read(workspace.pages[index(c)], *kernels_, buffer);
        ask_for_keys(layer.layout, workspace.rows[index(c)]);
    };
    if (n_candidates > 0) read(0);
    for (int c = 0; c < n_candidates; ++c) {
        if (c + 1 < n_candidates) read(c + 1);
        const int page = workspace.pages[index(c)];
        const std::byte* rows = workspace.rows[index(c)];
        float* gains = workspace.gains.data() + c * per_page;
        std::fill_n(gains, per_page, kMaskedLogit);
        if (rows == nullptr) continue;
        kernels_->products(layer.layout, rows, queries.data, queries.n, logits, per_page);
        for (int slot = 0; slot < per_page; ++slot) {
            const ColdRecord& record = head.cold->record(page * per_page + slot);
            if (!record.frozen()) continue;
            for (int r = 0; r < queries.n; ++r) {
                const float logit = soft_capped(logits[r * per_page + slot], queries.softcap) +
                                    queries.bias(r, record.position);
                gains[slot] = std::max(gains[slot], logit - workspace.masses[index(r)]);
            }
        }
    }
}

void HeadStore::recall(int layer_index, int head_index, int n_staged, const QueryRows& queries,
                       std::int32_t now, int workspace_index) noexcept {
    const Layer& layer = layers_[index(layer_index)];
    Head& head = layers_[index(layer_index)].heads[index(head_index)];
    Workspace& workspace = workspaces_[index(workspace_index)];
    if (!head.cold || head.cold->n_frozen() == 0 || head.count == 0) return;
    workspace.room = room_to_recall(layer, head, n_staged);
    const Protection& protection = settings_.protection;
    const int beyond = head.count - protection.n_sinks - protection.recent_window;
    const int most = std::max(beyond, 0) + workspace.room;
    if (most == 0) return;  // nothing could come back, whatever there is
    const auto start = std::chrono::steady_clock::now();
    weigh_active(layer, head, queries, workspace);
    const float least_gain = least_gain_of(head);
    const int n_candidates = find_candidates(head, queries, least_gain, workspace);
    weigh_candidates(layer, head, queries, n_candidates, workspace);
    const int n_incoming = take_best(layer, head, n_candidates, least_gain, most, workspace);
    if (n_incoming > 0) exchange(layer, head, head_index, n_incoming, least_gain, now, workspace);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    cold_nanoseconds_.fetch_add(
        std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
        std::memory_order_relaxed);
}

// The entries with the largest gains, `most` at most: as many as the head has room for and may give
// away.
int HeadStore::take_best(const Layer& layer, const Head& head, int n_candidates, float least_gain,
                         int most, Workspace& workspace) const noexcept {
    const int per_page = layer.layout.entries;
    std::int32_t* best = workspace.best.data();
    int n = 0;
    for (int i = 0; i < n_candidates * per_page; ++i)
        if (workspace.gains[index(i)] >= least_gain) best[n++] = i;
    if (n > most) {
        std::nth_element(best, best + most, best + n, [&](int a, int b) {
            const float of_a = workspace.gains[index(a)];
            const float of_b = workspace.gains[index(b)];
            return of_a > of_b || (of_a == of_b && a < b);
        });
        n = most;
        std::sort(best, best + n);
    }
    for (int i = 0; i < n; ++i) {
        const int c = best[i] / per_page;
        Incoming& entry = workspace.incoming[index(i)];
        entry = {workspace.pages[index(c)] * per_page + best[i] % per_page,
                 workspace.rows[index(c)],
                 best[i] % per_page,
                 {}};
        // What is frozen meanwhile may take the place of other pages.
        if (i < workspace.room || head.cold->stays(workspace.pages[index(c)])) continue;
        std::byte* page = aside(layer, i, workspace);
        copy_entry(layer.layout, entry.rows, entry.slot, page, i % per_page);
        entry.rows = page;
        entry.slot = i % per_page;
    }
    return n;
}

// The entries that were found: into the room that there is, then for as many of the least important
// ones.
void HeadStore::exchange(const Layer& layer, Head& head, int head_index, int n_incoming,
                         float least_gain, std::int32_t now, Workspace& workspace) noexcept {
    for (int n = 0; n < n_incoming; ++n) {
        Incoming& entry = workspace.incoming[index(n)];
        entry.record = head.cold->record(entry.home);
        head.cold->restore(entry.home);
    }
    recalled_.fetch_add(index(n_incoming), std::memory_order_relaxed);
    int n = 0;
    EntryCopies copies(layer.layout, *kernels_);
    const auto put_next = [&](int i) {
        const Incoming& entry = workspace.incoming[index(n)];
        put_restored(layer, head, i, entry.rows, entry.slot, entry.record, entry.home, now, copies);
        ++n;
    };
    const int n_held = head.count;
    while (n < std::min(n_incoming, workspace.room)) put_next(head.count++);
    if (n == n_incoming) return;
    const int keep = n_held - (n_incoming - n);
    const int n_all = head.count;
    head.count = n_held;  // the others have just come
    const std::int32_t newest = score(layer, head, head_index, 0, keep, workspace);
    // What these queries need stays before what others needed.
    for (int i = 0; i < head.count; ++i)
        if (workspace.active_gains[index(i)] >= least_gain)
            workspace.scores[index(i)] = std::numeric_limits<float>::max();
    select_survivors(workspace.scores.data(), workspace.positions.data(), head.count, keep,
                     protection_of(layer, head, newest), newest, workspace.kept.data(),
                     workspace.scratch.data());
    head.count = n_all;
    for (int i = 0; i < n_held && n < n_incoming; ++i) {
        if (workspace.kept[index(i)] != 0) continue;
        const int dropped = freeze_entry(layer, head, i, stored_slot(layer, head, i), now, kNever);
        for (int later = n; dropped != ColdHead::kNone && later < n_incoming; ++later)
            if (in_page(workspace.incoming[index(later)].home, dropped, layer))
                workspace.incoming[index(later)].home = ColdHead::kNone;
        put_next(i);
    }
}

}  // namespace entropykv
