#include "store/keeper.hpp"

#include <algorithm>
#include <chrono>

namespace entropykv {

void Keeper::keep_best(Head& head) noexcept {
    ranking_.score(head, {}, head.budget());
    keep_scored(head, {}, head.budget(), ranking_.newest());
}

void Keeper::keep_scored(Head& head, const StagedEntries& staged, int keep,
                         std::int32_t newest) noexcept {
    const int total = head.count() + staged.count;
    const Protection protection = common_.protection_of(head, newest);
    int n_kept = ranking_.select(total, keep, protection, newest);
    // The pool's bytes come first.
    if (n_kept > head.budget())
        n_kept = ranking_.select(total, keep, {0, 0, protection.oldest}, newest);
    if (head.frozen) {
        freezer_.freeze_unmarked(head, staged, newest, ranking_.mask());
    } else {
        count_dropped(head, total, n_kept, protection);
    }
    head.keep(ranking_.mask(), staged, *common_.kernels);
}

// What has left its window is not counted as evicted.
void Keeper::count_dropped(Head& head, int total, int n_kept,
                           const Protection& protection) noexcept {
    int n_left = 0;
    for (int i = 0; i < total; ++i) {
        const std::int32_t position = ranking_.positions()[i];
        if (protection.has_left(position)) {
            common_.note_left(head.shape(), position);
            ++n_left;
        } else if (head.dropped && ranking_.mask()[i] == 0) {
            head.dropped->add(ranking_.scores()[i]);
        }
    }
    common_.evicted.fetch_add(static_cast<std::size_t>(total - n_kept - n_left),
                              std::memory_order_relaxed);
}

void Keeper::take_in(Head& head, const StagedEntries& staged, float output_squares) noexcept {
    const int total = head.count() + staged.count;
    const std::int32_t newest = common_.newest;
    const bool evicts = total > head.budget();
    const bool measures = common_.measures_losses();
    if (!evicts && !measures) return head.append(staged, *common_.kernels);
    const auto start = std::chrono::steady_clock::now();
    const int keep =
        entries_to_keep(head.budget(), staged.count, common_.protection_of(head, newest));
    if (measures) {
        ranking_.score(head, staged, keep);
        ranking_.measure_losses(head, total, newest, output_squares);
    }
    if (!evicts) return head.append(staged, *common_.kernels);
    if (leave_window(head, staged)) return;
    if (!measures) ranking_.score(head, staged, keep);
    keep_scored(head, staged, keep, newest);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    common_.eviction_nanoseconds.fetch_add(
        std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
        std::memory_order_relaxed);
}

// Drops what no query after the micro-batch sees, if the others then fit the budget; whether they
// do. Where there is room, what the last queries saw stays. (Where windows are chunked, a part of
// the one before would be of no use.)
bool Keeper::leave_window(Head& head, const StagedEntries& staged) noexcept {
    const std::int32_t oldest = head.shape().oldest_seen(common_.newest + 1);
    if (oldest <= 0) return false;
    const int margin = head.shape().chunked ? 0 : kWindowMargin;
    return keep_from(head, staged, oldest - margin) || keep_from(head, staged, oldest);
}

// Drops what is older, if the others fit the budget; whether they do.
bool Keeper::keep_from(Head& head, const StagedEntries& staged, std::int32_t oldest) noexcept {
    int n_kept = 0;
    std::int32_t left = -1;
    std::uint8_t* mask = ranking_.mask();
    head.over_pages(staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = head.layout().positions(page);
        for (int i = 0; i < n; ++i) {
            const bool stays = positions[i] >= oldest;
            mask[first + i] = stays ? 1 : 0;
            n_kept += stays ? 1 : 0;
            if (!stays) left = std::max(left, positions[i]);
        }
    });
    if (n_kept > head.budget()) return false;
    if (left >= 0) common_.note_left(head.shape(), left);
    head.keep(mask, staged, *common_.kernels);
    return true;
}

}  // namespace entropykv
