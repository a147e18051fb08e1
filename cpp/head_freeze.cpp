// Entries that a head does not keep go to cold storage, and come back: by the schedule's timers, by
// the relevance to the queries of a step, or because somebody asks for them.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "head_store.hpp"

namespace entropykv {
namespace {

constexpr int kRowsAtOnce = 4;   // queries whose logits are held
constexpr int kCandidates = 64;  // stored pages that are looked into for one recall, at most
// Logs of shares of a query's attention: what makes an entry worth it, and how much less than it a
// page's clusters may promise.
const float kLeastGain = std::log(0.005f);
constexpr float kSlack = 1.5f;

}  // namespace

void HeadStore::start_freezing() {
    const FreezeSettings& freezing = *settings_.freezing;
    if (settings_.own_windows)
        throw std::invalid_argument("heads that keep the same positions cannot be frozen");
    std::size_t page_bytes = 0;
    std::size_t n_heads = 0;
    for (Layer& layer : layers_) {
        if (layer.shape.window > 0) continue;  // what leaves a window is never seen again
        layer.cold = std::make_unique<ColdLayout>(freezing.type, layer.layout);
        page_bytes = std::max(page_bytes, layer.cold->codec.bytes());
        n_heads += layer.heads.size();
    }
    if (n_heads == 0) throw std::invalid_argument("every layer has a window: nothing to freeze");
    if (freezing.descriptor >= 0) {
        cold_ = std::make_unique<FileStorage>(page_bytes, freezing.descriptor, freezing.nonce);
    } else {
        cold_ = std::make_unique<MemoryStorage>(page_bytes);
    }
    schedule_ = freezing.schedule;
    std::size_t most_pages = 0;  // besides the open one
    if (freezing.limit_bytes > 0) {
        const std::size_t of_head = freezing.limit_bytes / (n_heads * page_bytes);
        if (of_head < 2)
            throw std::invalid_argument("cold storage must hold 2 pages of every KV head, " +
                                        std::to_string(2 * n_heads * page_bytes) + " bytes");
        most_pages = of_head - 1;
    }
    for (Layer& layer : layers_)
        if (layer.cold)
            for (Head& head : layer.heads) head.cold.emplace(*layer.cold, *cold_, most_pages);
}

void HeadStore::size_for_recall(Workspace& workspace) const {
    if (!cold_) return;
    std::size_t entries = 0;
    for (const Layer& layer : layers_) entries = std::max(entries, index(layer.layout.entries));
    const std::size_t n = index(kCandidates + 1);
    // Whole groups of every page, also of the last one.
    workspace.logits.resize(
        std::max(index(kRowsAtOnce) * workspace.scores.size(),
                 kMostQueryRows * std::max<std::size_t>(entries, kGroupEntries)) +
        entries);
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

int HeadStore::most_recalled(int layer, int head) const {
    const Head& of = head_at(layer, head);
    if (!of.cold) return 0;
    const int beyond = (kCandidates + 1) * layers_[index(layer)].layout.entries;
    return std::min(of.cold->n_frozen(), beyond);
}

// Cold room for all that a micro-batch can freeze, and how many entries may come back by timers.
int HeadStore::prepare_cold(const Layer& layer, Head& head, int n_tokens, std::int32_t newest) {
    if (!head.cold) return 0;
    const int most = head.count + n_tokens;
    const int recalled = (kCandidates + 1) * layer.layout.entries;
    const int beyond = std::max(0, most - head.budget + kDecodeRoom);
    head.cold->prepare(schedule_ ? most : std::min(most, beyond + recalled));
    const std::size_t pages = index(head.cold->n_pages() + n_tokens / layer.layout.entries + 2);
    for (Workspace& workspace : workspaces_)
        if (workspace.worth.size() < pages) workspace.worth.resize(2 * pages);
    return schedule_ ? head.cold->count_due(newest) : 0;
}

void HeadStore::size_homes(const Layer& layer, Head& head) {
    if (!head.cold) return;
    const std::size_t n = head.pages.size() * index(layer.layout.entries);
    if (head.homes.size() < n) head.homes.resize(n, ColdHead::kNone);
    if (schedule_ && head.detections.size() < n) head.detections.resize(n);
}

// ------------------------------------------------------------------------------------------------
// single entries

// Entry i, stored or staged, at `slot` goes to cold storage. Returns the page of records that was
// dropped for it, or kNone.
int HeadStore::freeze_entry(const Layer& layer, Head& head, int i, const Slot& slot,
                            std::int32_t now, std::int32_t due) noexcept {
    const float importance = layer.layout.importance(slot.page)[slot.index];
    const bool stored = i < head.count;
    const Detections detections = stored && schedule_ ? head.detections[index(i)] : Detections{};
    frozen_.fetch_add(1, std::memory_order_relaxed);
    if (stored && head.homes[index(i)] != ColdHead::kNone) {
        head.cold->freeze(head.homes[index(i)], importance, now, due, detections);
        return ColdHead::kNone;
    }
    const std::int32_t position = layer.layout.positions(slot.page)[slot.index];
    head.cold->add(slot.page, slot.index, {position, importance, now, due, detections},
                   settings_.importance.decay, *kernels_);
    const int dropped = head.cold->dropped_page();
    if (dropped == ColdHead::kNone) return dropped;
    evicted_.fetch_add(index(head.cold->n_dropped()), std::memory_order_relaxed);
    for (int other = 0; other < head.count; ++other)
        if (in_page(head.homes[index(other)], dropped, layer))
            head.homes[index(other)] = ColdHead::kNone;
    return dropped;
}

// A record's entry, in a slot of `page`, takes the place of entry i.
void HeadStore::put_restored(const Layer& layer, Head& head, int i, const std::byte* page, int slot,
                             const ColdRecord& record, int home, std::int32_t now) noexcept {
    const Slot target = stored_slot(layer, head, i);
    copy_entry(layer.layout, page, slot, target.page, target.index);
    layer.layout.positions(target.page)[target.index] = record.position;
    layer.layout.importance(target.page)[target.index] =
        record.importance * decay_factor(settings_.importance.decay, now - record.frozen_at);
    head.homes[index(i)] = home;
    if (schedule_) head.detections[index(i)] = record.detections;
    restored_.fetch_add(1, std::memory_order_relaxed);
}

void HeadStore::freeze_victims(const Layer& layer, Head& head, int head_index, int total,
                               std::int32_t now, const std::uint8_t* kept) noexcept {
    for (int i = 0; i < total; ++i) {
        if (kept[i] != 0) continue;
        const Slot slot = i < head.count ? stored_slot(layer, head, i)
                                         : staged_slot(layer, head_index, i - head.count);
        freeze_entry(layer, head, i, slot, now, kNever);
    }
}

// Restores frozen records that `wants` names at the end of the head, while its budget and its pages
// have room.
template <typename Wants>
int HeadStore::append_restored(const Layer& layer, Head& head, std::int32_t now,
                               Workspace& workspace, Wants wants) noexcept {
    const int per_page = layer.layout.entries;
    const int room = std::min(head.budget, static_cast<int>(head.pages.size()) * per_page);
    int n = 0;
    for (int page = 0; page < head.cold->n_pages() && head.count < room; ++page) {
        if (head.cold->n_frozen(page) == 0) continue;
        const std::byte* rows = nullptr;
        for (int i = page * per_page; i < (page + 1) * per_page && head.count < room; ++i) {
            const ColdRecord record = head.cold->record(i);
            if (!record.frozen() || !wants(record)) continue;
            if (rows == nullptr)
                rows = head.cold->read(page, *kernels_, workspace.candidates.data());
            if (rows == nullptr) break;
            ++head.count;
            put_restored(layer, head, head.count - 1, rows, i % per_page, record, i, now);
            head.cold->restore(i);
            ++n;
        }
    }
    return n;
}

// ------------------------------------------------------------------------------------------------
// the schedule

// What an entry's relevance must be below to be detected: |q.k| as it is; attention in relation to
// an even share among what the head holds.
float HeadStore::detection_limit(const Layer& layer, const Head& head,
                                 int n_queries) const noexcept {
    const auto rows = static_cast<float>(layer.shape.n_head / layer.shape.n_head_kv * n_queries);
    const float share = schedule_->threshold / static_cast<float>(head.count);
    switch (settings_.importance.kind) {
        case ScoreKind::attention: return rows * share;
        case ScoreKind::mass: return rows * share * share;
        default: return rows * schedule_->threshold;
    }
}

// Counts the stored entries that the queries found little in, and freezes them for a while.
void HeadStore::freeze_detected(const Layer& layer, Head& head, int head_index, int n_queries,
                                const float* observed, std::int32_t newest,
                                Workspace& workspace) noexcept {
    const float limit = detection_limit(layer, head, n_queries);
    std::uint8_t* kept = workspace.kept.data();
    bool frozen = false;
    for (int i = 0; i < head.count; ++i) {
        const Slot slot = stored_slot(layer, head, i);
        kept[i] = 1;
        if (observed[i] >= limit ||
            !can_freeze(layer.layout.positions(slot.page)[slot.index], newest))
            continue;
        const int steps = freeze_steps(
            detect(head.detections[index(i)], newest, schedule_->history), schedule_->rate);
        if (steps == 0) continue;
        freeze_entry(layer, head, i, slot, newest, newest + steps);
        kept[i] = 0;
        frozen = true;
    }
    if (frozen) apply(layer, head, head_index, 0, kept);
}

void HeadStore::restore_due(const Layer& layer, Head& head, std::int32_t newest,
                            Workspace& workspace) noexcept {
    append_restored(layer, head, newest, workspace, [&](const ColdRecord& record) {
        return record.due <= newest && record.frozen_at < newest;
    });
}

// ------------------------------------------------------------------------------------------------
// recall by relevance

// What every query attends to now: its mass, and the gains of the entries that the head holds.
void HeadStore::weigh_active(const Layer& layer, const Head& head, const QueryRows& queries,
                             Workspace& workspace) const noexcept {
    float* gains = workspace.active_gains.data();
    std::fill_n(gains, head.count, kMaskedLogit);
    for (int first_row = 0; first_row < queries.n; first_row += kRowsAtOnce) {
        const int rows = std::min(kRowsAtOnce, queries.n - first_row);
        float* logits = workspace.logits.data();
        const int stride = static_cast<int>(workspace.scores.size());
        over_pages(layer, head, 0, 0, [&](std::byte* page, int, int first) {
            kernels_->products(layer.layout, page, queries.row(first_row), rows, logits + first,
                               stride);
        });
        for (int r = 0; r < rows; ++r, logits += stride) {
            for (int i = 0; queries.softcap > 0.0f && i < head.count; ++i)
                logits[i] = soft_capped(logits[i], queries.softcap);
            const float mass = kernels_->log_sum(logits, head.count);
            workspace.masses[index(first_row + r)] = mass;
            for (int i = 0; i < head.count; ++i) gains[i] = std::max(gains[i], logits[i] - mass);
        }
    }
}

// The pages that may hold what the queries need most, by their summaries; the open one first.
int HeadStore::find_candidates(const Head& head, const QueryRows& queries,
                               Workspace& workspace) const noexcept {
    const ColdHead& cold = *head.cold;
    const float* worth = workspace.worth.data();
    cold.estimate(*kernels_, queries, workspace.masses.data(), workspace.logits.data(),
                  workspace.worth.data());
    int* found = workspace.pages.data();
    int n = 0;
    if (cold.open_page() != ColdHead::kNone && cold.n_frozen(cold.open_page()) > 0)
        found[n++] = cold.open_page();
    const int first = n;
    for (int page = 0; page < cold.n_pages(); ++page) {
        if (page == cold.open_page() || cold.n_frozen(page) == 0) continue;
        if (worth[page] < kLeastGain - kSlack) continue;
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
    for (int c = 0; c < n_candidates; ++c) {
        const int page = workspace.pages[index(c)];
        std::byte* buffer = workspace.candidates.data() + index(c) * candidate_bytes();
        const std::byte* rows = head.cold->read(page, *kernels_, buffer);
        workspace.rows[index(c)] = rows;
        float* gains = workspace.gains.data() + c * per_page;
        std::fill_n(gains, per_page, kMaskedLogit);
        if (rows == nullptr) continue;
        kernels_->products(layer.layout, rows, queries.data, queries.n, logits, per_page);
        for (int r = 0; r < queries.n; ++r)
            for (int slot = 0; slot < per_page; ++slot)
                gains[slot] = std::max(gains[slot],
                                       soft_capped(logits[r * per_page + slot], queries.softcap) -
                                           workspace.masses[index(r)]);
        for (int slot = 0; slot < per_page; ++slot)
            if (!head.cold->record(page * per_page + slot).frozen()) gains[slot] = kMaskedLogit;
    }
}

void HeadStore::recall(int layer_index, int head_index, int n_staged, const QueryRows& queries,
                       std::int32_t now, int workspace_index) noexcept {
    const Layer& layer = layers_[index(layer_index)];
    Head& head = layers_[index(layer_index)].heads[index(head_index)];
    Workspace& workspace = workspaces_[index(workspace_index)];
    if (!head.cold || head.cold->n_frozen() == 0 || head.count == 0) return;
    workspace.room = room_to_recall(layer, head, n_staged);
    const auto start = std::chrono::steady_clock::now();
    weigh_active(layer, head, queries, workspace);
    const int n_candidates = find_candidates(head, queries, workspace);
    weigh_candidates(layer, head, queries, n_candidates, workspace);
    const int n_incoming = take_best(layer, head, n_candidates, workspace);
    if (n_incoming > 0) exchange(layer, head, head_index, n_incoming, now, workspace);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    cold_nanoseconds_.fetch_add(
        std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
        std::memory_order_relaxed);
}

// Copies the entries with the largest gains aside: as many as the head has room for, or may give
// away.
int HeadStore::take_best(const Layer& layer, const Head& head, int n_candidates,
                         Workspace& workspace) const noexcept {
    const int per_page = layer.layout.entries;
    const Protection& protection = settings_.protection;
    const int beyond = head.count - protection.n_sinks - protection.recent_window;
    const int most = std::max(beyond, 0) + workspace.room;
    std::int32_t* best = workspace.best.data();
    int n = 0;
    for (int i = 0; i < n_candidates * per_page; ++i)
        if (workspace.gains[index(i)] >= kLeastGain) best[n++] = i;
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
        copy_entry(layer.layout, workspace.rows[index(c)], best[i] % per_page,
                   aside(layer, i, workspace), i % per_page);
        workspace.incoming[index(i)].home =
            workspace.pages[index(c)] * per_page + best[i] % per_page;
    }
    return n;
}

// The entries that were copied aside: into the room that there is, then for as many of the least
// important ones.
void HeadStore::exchange(const Layer& layer, Head& head, int head_index, int n_incoming,
                         std::int32_t now, Workspace& workspace) noexcept {
    for (int n = 0; n < n_incoming; ++n) {
        Incoming& entry = workspace.incoming[index(n)];
        entry.record = head.cold->record(entry.home);
        head.cold->restore(entry.home);
    }
    recalled_.fetch_add(index(n_incoming), std::memory_order_relaxed);
    int n = 0;
    const auto put_next = [&](int i) {
        const Incoming& entry = workspace.incoming[index(n)];
        put_restored(layer, head, i, aside(layer, n, workspace), n % layer.layout.entries,
                     entry.record, entry.home, now);
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
        if (workspace.active_gains[index(i)] >= kLeastGain)
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

// ------------------------------------------------------------------------------------------------
// between micro-batches

void HeadStore::freeze_all(std::int32_t now) {
    Workspace& workspace = workspaces_[0];
    for (Layer& layer : layers_)
        for (Head& head : layer.heads)
            if (head.cold) head.cold->prepare(head.count);
    for (Layer& layer : layers_) {
        for (int h = 0; h < layer.shape.n_head_kv; ++h) {
            Head& head = layer.heads[index(h)];
            if (!head.cold) continue;
            std::fill_n(workspace.kept.begin(), head.count, std::uint8_t{0});
            freeze_victims(layer, head, h, head.count, now, workspace.kept.data());
            apply(layer, head, h, 0, workspace.kept.data());
            drop_pages(layer, head, 0);
        }
    }
}

std::size_t HeadStore::restore(const Asked& asked, std::int32_t now, bool forget) {
    std::size_t n = 0;
    for (Layer& layer : layers_) {
        for (Head& head : layer.heads) {
            if (!head.cold) continue;
            if (forget) {
                head.cold->clear_detections();
                std::fill(head.detections.begin(), head.detections.end(), Detections{});
            }
            grow_pages(layer, head, std::min(head.budget, head.count + head.cold->n_frozen()));
            size_homes(layer, head);
            n += index(
                append_restored(layer, head, now, workspaces_[0], [&](const ColdRecord& record) {
                    return record.frozen_at > asked.frozen_after && record.due > asked.due_after;
                }));
            drop_pages(layer, head, head.count);
        }
    }
    return n;
}

void HeadStore::stop_freezing() {
    std::size_t lost = 0;
    for (Layer& layer : layers_) {
        for (Head& head : layer.heads) {
            if (head.cold) lost += index(head.cold->n_frozen());
            head.cold.reset();
        }
    }
    evicted_.fetch_add(lost, std::memory_order_relaxed);
    schedule_.reset();
}

std::size_t HeadStore::frozen() const {
    std::size_t total = 0;
    for (const Layer& layer : layers_)
        for (const Head& head : layer.heads)
            if (head.cold) total += index(head.cold->n_frozen());
    return total;
}

std::vector<std::int32_t> HeadStore::frozen_positions(int layer_index, int head_index) const {
    const Head& head = head_at(layer_index, head_index);
    std::vector<std::int32_t> result;
    for (int i = 0; head.cold && i < head.cold->n_records(); ++i)
        if (head.cold->record(i).frozen()) result.push_back(head.cold->record(i).position);
    std::sort(result.begin(), result.end());
    return result;
}

std::size_t HeadStore::cold_bytes() const {
    std::size_t bytes = 0;
    for (const Layer& layer : layers_)
        for (const Head& head : layer.heads)
            if (head.cold)
                bytes += head.cold->stored_pages() * cold_->page_bytes() +
                         (head.cold->open_page() != ColdHead::kNone ? layer.layout.bytes : 0);
    return bytes;
}

std::size_t HeadStore::cold_index_bytes() const {
    std::size_t bytes = 0;
    for (const Layer& layer : layers_)
        for (const Head& head : layer.heads)
            if (head.cold) bytes += head.cold->index_bytes();
    return bytes;
}

}  // namespace entropykv
