#include "store/evictor.hpp"

#include <algorithm>
#include <chrono>

namespace entropykv {

void Evictor::evict_to_budget(Head& head) noexcept {
    scorer_.score(head, {});
    keep_highest_scored(head, {}, head.budget(), scorer_.newest());
}

void Evictor::keep_highest_scored(Head& head, const StagedEntries& staged, int keep,
                                  std::int32_t newest) noexcept {
    const int total = head.count() + staged.count;
    const Protection protection = common_.protection_of(head, newest);
    int n_kept = scorer_.select(total, keep, protection, newest);
    // The head is still over its budget, because too many entries are protected: evict sinks and
    // recent entries, too.
    if (n_kept > head.budget())
        n_kept = scorer_.select(total, keep, {0, 0, protection.oldest}, newest);
    if (head.frozen) {
        freezer_.freeze_unmarked(head, staged, newest, scorer_.mask());
    } else {
        count_dropped(head, total, n_kept, protection);
    }
    head.keep(scorer_.mask(), staged, *common_.kernels);
}

// Entries that have left the window of their layer are not counted as evicted.
void Evictor::count_dropped(Head& head, int total, int n_kept,
                            const Protection& protection) noexcept {
    int n_left = 0;
    const bool counts_entries = protection.oldest > 0 || head.dropped;
    for (int i = 0; i < total && counts_entries; ++i) {
        const std::int32_t position = scorer_.positions()[i];
        if (protection.has_left(position)) {
            common_.note_left_window(head.shape(), position);
            ++n_left;
        } else if (head.dropped && scorer_.mask()[i] == 0) {
            head.dropped->add(scorer_.scores()[i]);
        }
    }
    const auto n_evicted = static_cast<std::size_t>(total - n_kept - n_left);
    common_.evicted.fetch_add(n_evicted, std::memory_order_relaxed);
    if (head.undo && head.undo->records()) head.undo->note_evicted(n_evicted);
}

void Evictor::commit(Head& head, const StagedEntries& staged, float output_squares) noexcept {
    const int total = head.count() + staged.count;
    const std::int32_t newest = staged.newest;
    const bool evicts = total > head.budget();
    const bool measures = common_.measures_losses();
    if (!evicts && !measures) return head.append(staged, *common_.kernels);
    const auto start = std::chrono::steady_clock::now();
    const int keep =
        entries_to_keep(head.budget(), staged.count, common_.protection_of(head, newest));
    if (measures) {
        scorer_.score(head, staged);
        scorer_.measure_losses(head, total, newest, output_squares);
    }
    if (!evicts) return head.append(staged, *common_.kernels);
    if (drop_outside_window(head, staged)) return;
    if (!measures) scorer_.score(head, staged);
    keep_highest_scored(head, staged, keep, newest);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    common_.eviction_nanoseconds.fetch_add(
        std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
        std::memory_order_relaxed);
}

// Drops the entries that no query after the micro-batch attends to, if the rest then fits the
// budget, and returns whether it does. If there is room, a margin of older entries stays for a
// rollback. Chunked windows get no margin, since a part of the previous chunk would be useless.
bool Evictor::drop_outside_window(Head& head, const StagedEntries& staged) noexcept {
    const std::int32_t oldest = head.shape().oldest_seen(staged.newest + 1);
    if (oldest <= 0) return false;
    const int margin = head.shape().chunked ? 0 : kWindowMargin;
    return drop_before(head, staged, oldest - margin) || drop_before(head, staged, oldest);
}

// Drops the entries before position `oldest` if the rest fits the budget; returns whether it does.
bool Evictor::drop_before(Head& head, const StagedEntries& staged, std::int32_t oldest) noexcept {
    int n_kept = 0;
    std::int32_t left = -1;
    std::uint8_t* mask = scorer_.mask();
    head.for_each_page(staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = head.layout().positions(page);
        for (int i = 0; i < n; ++i) {
            const bool stays = positions[i] >= oldest;
            mask[first + i] = stays ? 1 : 0;
            n_kept += stays ? 1 : 0;
            if (!stays) left = std::max(left, positions[i]);
        }
    });
    if (n_kept > head.budget()) return false;
    if (left >= 0) common_.note_left_window(head.shape(), left);
    head.keep(mask, staged, *common_.kernels);
    return true;
}

}  // namespace entropykv
