// Entries that a head does not keep go to cold storage, and come back: by the schedule's timers, or
// because somebody asks for them. (By relevance: head_recall.cpp.)
#include <algorithm>
#include <stdexcept>

#include "store/head_store.hpp"

namespace entropykv {

void HeadStore::start_freezing() {
    const FreezeSettings& freezing = *settings_.freezing;
    if (settings_.own_windows)
        throw std::invalid_argument("heads that keep the same positions cannot be frozen");
    if (freezing.schedule) {
        const FreezeSchedule& schedule = *freezing.schedule;
        if (schedule.window < 0 || schedule.window > kMostPositions || schedule.history < 0 ||
            !(schedule.rate > 0.0f) || !(schedule.threshold >= 0.0f))
            throw std::invalid_argument("a schedule of freezing with impossible numbers");
    }
    std::size_t page_bytes = 0;  // of cold storage
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
    std::size_t most_pages = 0;  // besides the open one, which is as wide as the store's
    if (freezing.limit_bytes > 0) {
        const std::size_t of_head = freezing.limit_bytes / n_heads;
        const std::size_t least = this->page_bytes() + page_bytes;
        if (of_head < least)
            throw std::invalid_argument("cold storage must hold 2 pages of every KV head, " +
                                        std::to_string(n_heads * least) + " bytes");
        most_pages = (of_head - this->page_bytes()) / page_bytes;
    }
    for (Layer& layer : layers_)
        if (layer.cold)
            for (Head& head : layer.heads) head.cold.emplace(*layer.cold, *cold_, most_pages);
}

// Cold room for all that a micro-batch can freeze, and how many entries may come back by timers.
int HeadStore::prepare_cold(const Layer& layer, Head& head, int n_tokens, std::int32_t newest) {
    if (!head.cold) return 0;
    const int held = head.count + n_tokens;
    const int recalled = most_recalled(head);
    const int due = schedule_ ? head.cold->count_due(newest) : 0;
    // Without a schedule, what is evicted gets a record, and what is exchanged for recalled
    // entries. Under one, everything may; and what came back twice, where a limit dropped its
    // record.
    const int evicted = std::max(0, held - head.budget + kDecodeRoom);
    const int n_new = !schedule_                ? evicted + recalled
                      : head.cold->is_limited() ? held + recalled + due
                                                : held;
    head.cold->prepare(n_new);
    size_for_frozen(layer, index(head.cold->n_pages()));
    return due;
}

void HeadStore::size_homes(const Layer& layer, Head& head) {
    if (!head.cold) return;
    const std::size_t n = head.pages.size() * index(layer.layout.entries);
    if (head.homes.size() < n) head.homes.resize(n, ColdHead::kNone);
    if (schedule_ && head.detections.size() < n) head.detections.resize(n);
}

// ------------------------------------------------------------------------------------------------
// single entries

// How often entry i, stored or staged, was detected.
Detections HeadStore::detections_of(const Head& head, int i) const noexcept {
    return i < head.count && schedule_ ? head.detections[index(i)] : Detections{};
}

// Entry i, stored or staged, at `slot` goes to cold storage. Returns the page of records that was
// dropped for it, or kNone.
int HeadStore::freeze_entry(const Layer& layer, Head& head, int i, const Slot& slot,
                            std::int32_t now, std::int32_t due, Detections detections) noexcept {
    const bool stored = i < head.count;
    const float importance =
        stored ? stored_importance(layer, head, i) : layer.layout.importance(slot.page)[slot.index];
    ++head.n_frozen;
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

// Entry i, whose K and V are there, is that of a record.
void HeadStore::note_restored(const Layer& layer, Head& head, int i, const ColdRecord& record,
                              int home, std::int32_t now) noexcept {
    const Slot target = stored_slot(layer, head, i);
    layer.layout.positions(target.page)[target.index] = record.position;
    layer.layout.importance(target.page)[target.index] =
        record.importance * decay_factor(settings_.importance.decay, now - record.frozen_at);
    head.homes[index(i)] = home;
    if (schedule_) head.detections[index(i)] = record.detections;
    ++head.n_restored;
}

void HeadStore::freeze_victims(const Layer& layer, Head& head, int head_index, int total,
                               std::int32_t now, const std::uint8_t* kept) noexcept {
    for (int i = 0; i < total; ++i) {
        if (kept[i] != 0) continue;
        const Slot slot = i < head.count ? stored_slot(layer, head, i)
                                         : staged_slot(layer, head_index, i - head.count);
        freeze_entry(layer, head, i, slot, now, kNever, detections_of(head, i));
    }
}

// Calls place() for every frozen record that `wants` names, until it returns kNone: where the entry
// goes. Returns how many were restored.
template <typename Wants, typename Place>
int HeadStore::restore_wanted(const Layer& layer, Head& head, std::int32_t now,
                              Workspace& workspace, Wants wants, Place place) noexcept {
    const int per_page = layer.layout.entries;
    int n = 0;
    for (int page = 0; page < head.cold->n_pages(); ++page) {
        if (head.cold->n_frozen(page) == 0) continue;
        const std::byte* rows = nullptr;
        for (int slot = 0; slot < per_page; ++slot) {
            const int i = page * per_page + slot;
            if (!wants(*head.cold, i)) continue;
            if (rows == nullptr) rows = head.cold->read(page, workspace.page_read.data());
            if (rows == nullptr) break;
            const int target = place();
            if (target == ColdHead::kNone) return n;
            const Slot to = stored_slot(layer, head, target);
            head.cold->take(rows, i, *kernels_, to.page, to.index);
            note_restored(layer, head, target, head.cold->record(i), i, now);
            head.cold->restore(i);
            ++n;
        }
    }
    return n;
}

// At the end of the head, while its budget and its pages have room.
template <typename Wants>
int HeadStore::append_restored(const Layer& layer, Head& head, std::int32_t now,
                               Workspace& workspace, Wants wants) noexcept {
    const int per_page = layer.layout.entries;
    const int room = std::min(head.budget, static_cast<int>(head.pages.size()) * per_page);
    return restore_wanted(layer, head, now, workspace, wants,
                          [&] { return head.count < room ? head.count++ : ColdHead::kNone; });
}

// ------------------------------------------------------------------------------------------------
// the schedule

// What an entry's relevance must be below to be detected: |q.k| as it is; attention in relation to
// an even share among what the head holds. Of many queries, the last ones count.
float HeadStore::detection_limit(const Layer& layer, const Head& head,
                                 int n_queries) const noexcept {
    const int n_observed = std::min(n_queries, settings_.importance.observation_window);
    const int of_query = layer.shape.n_head / layer.shape.n_head_kv * layer.shape.readers;
    const auto rows = static_cast<float>(of_query * n_observed);
    const float even = schedule_->threshold / static_cast<float>(head.count);
    const auto little = settings_.importance.measure().little;
    return little == nullptr ? 0.0f : little({rows, even, schedule_->threshold});
}

// Counts the stored entries that the queries found little in, and freezes them for a while. Those
// that are due take their places, as far as the staged entries leave room.
void HeadStore::follow_schedule(const Layer& layer, Head& head, int head_index, int n_queries,
                                const float* observed, std::int32_t newest,
                                Workspace& workspace) noexcept {
    const float limit = detection_limit(layer, head, n_queries);
    head.cold->ask_for_due(newest);
    std::uint8_t* kept = workspace.kept.data();
    int n_frozen = 0;
    over_pages(layer, head, head_index, 0, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = layer.layout.positions(page);
        for (int slot = 0; slot < n; ++slot) {
            const int i = first + slot;
            kept[i] = 1;
            if (observed[i] >= limit || !can_freeze(positions[slot], newest)) continue;
            const Detections detections =
                detected(head.detections[index(i)], newest, schedule_->history);
            const int steps = freeze_steps(count_detections(detections, newest, schedule_->history),
                                           schedule_->rate);
            if (steps == 0) {
                head.detections[index(i)] = detections;
                continue;
            }
            freeze_entry(layer, head, i, {page, slot}, newest, newest + steps, detections);
            kept[i] = 0;
            ++n_frozen;
        }
    });
    if (n_frozen == 0) return;
    int room = std::min(n_frozen, head.budget - n_queries - (head.count - n_frozen));
    int hole = 0;
    restore_wanted(layer, head, newest, workspace, is_due(newest), [&] {
        if (room-- <= 0) return ColdHead::kNone;
        while (kept[hole] != 0) ++hole;
        kept[hole] = 1;
        return hole;
    });
    apply(layer, head, head_index, 0, kept);
}

void HeadStore::restore_due(const Layer& layer, Head& head, std::int32_t newest,
                            Workspace& workspace) noexcept {
    append_restored(layer, head, newest, workspace, is_due(newest));
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
            const auto wants = [&](const ColdHead& cold, int i) {
                const ColdRecord record = cold.record(i);
                return record.frozen() && record.frozen_at > asked.frozen_after &&
                       record.due > asked.due_after;
            };
            // Sinks and the recent window first: no head may be without them.
            const Protection protection = protection_of(layer, head, now);
            const auto wants_first = [&](const ColdHead& cold, int i) {
                return wants(cold, i) && protection.covers(cold.position(i), now);
            };
            n += index(append_restored(layer, head, now, workspaces_[0], wants_first));
            n += index(append_restored(layer, head, now, workspaces_[0], wants));
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
    return total([](const Head& head) { return head.cold ? index(head.cold->n_frozen()) : 0; });
}

std::vector<std::int32_t> HeadStore::frozen_positions(int layer_index, int head_index) const {
    const Head& head = head_at(layer_index, head_index);
    std::vector<std::int32_t> result;
    for (int i = 0; head.cold && i < head.cold->n_records(); ++i)
        if (head.cold->frozen(i)) result.push_back(head.cold->position(i));
    std::sort(result.begin(), result.end());
    return result;
}

std::size_t HeadStore::sketch_bytes() const {
    return total([](const Head& head) { return head.cold ? head.cold->sketch_bytes() : 0; });
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

}  // namespace entropykv
