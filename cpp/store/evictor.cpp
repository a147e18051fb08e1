#include "store/evictor.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "platform/scratch.hpp"

namespace entropykv {
namespace {

// If norms exceed the range of floats, a score may be infinite or not a number, and could not be
// compared.
void make_finite(float* scores, int n) {
    for (int i = 0; i < n; ++i)
        scores[i] =
            scores[i] > 0.0f ? std::min(scores[i], std::numeric_limits<float>::max()) : 0.0f;
}

// Adds what queries gave to n entries. The kinds of importance have loops of their own, without
// branches.
template <bool largest, bool packed>
void add_given(const GivenByQueries& asked, const float* observed, const std::int32_t* positions,
               int n, float* importance) {
    const GivenByQueries by = asked;  // a copy, which no write of the loop can change
    for (int i = 0; i < n; ++i) {
        const float so_far = packed ? PackedImportance(importance[i]).given() : importance[i];
        const float kept = so_far * by.factor;
        const float seen = observed[i];
        const float given = positions[i] <= by.limit ? seen : 0.0f;
        const float next = largest ? std::max(kept, given) : kept + by.weight * given;
        // Queries that are not numbers, or are too large for floats, must not change the
        // importance.
        const float sum = next <= std::numeric_limits<float>::max() ? next : kept;
        importance[i] = packed ? PackedImportance(importance[i]).with_given(sum).packed() : sum;
    }
}

}  // namespace

void Evictor::size(std::size_t n, std::size_t page_entries) {
    n_scored_ = 0;
    selected_ = {};
    fit(positions_, n);
    fit(scores_, n);
    fit(scratch_, n);
    fit(mask_, n);
    fit(of_page_, page_entries);
}

std::size_t Evictor::bytes() const {
    return bytes_of(positions_) + bytes_of(scores_) + bytes_of(scratch_) + bytes_of(of_page_) +
           bytes_of(mask_);
}

void Evictor::add_observed(Head& head, const StagedEntries& staged,
                           const float* observed) const noexcept {
    // Of single tokens only every interval-th query counts, on behalf of all since the last one.
    // Entries in its neighbourhood are left out here; for the queries of a chunk, the kernels leave
    // them out.
    const bool single = common_.single_query;
    const int interval = common_.scoring_interval();
    const float factor = decay_factor(common_.importance().decay, single ? interval : staged.count);
    add(head, staged, observed,
        {factor, single ? static_cast<float>(interval) : 1.0f,
         single ? staged.newest - common_.neighbourhood() : staged.newest});
}

void Evictor::add_sum(Head& head, int n_queries, const float* sum) const noexcept {
    const float factor =
        decay_factor(common_.importance().decay, n_queries * common_.scoring_interval());
    add(head, {}, sum, {factor, 1.0f, std::numeric_limits<std::int32_t>::max()});
}

void Evictor::add(Head& head, const StagedEntries& staged, const float* observed,
                  const GivenByQueries& given) const noexcept {
    if (head.dropped) head.dropped->decay(given.factor);
    const bool packed = common_.predicts();
    const auto add_to = common_.measure().by_largest()
                            ? (packed ? &add_given<true, true> : &add_given<true, false>)
                            : (packed ? &add_given<false, true> : &add_given<false, false>);
    head.for_each_page(staged, [&](std::byte* page, int n, int first) {
        add_to(given, observed + first, head.layout().positions(page), n,
               head.importance_of(page, first));
    });
}

void Evictor::raise_predicted_shares(Head& head, const StagedEntries& staged,
                                     const float* echo_shares) const noexcept {
    head.for_each_page(staged, [&](std::byte* page, int n, int first) {
        float* importance = head.importance_of(page, first);
        for (int i = 0; i < n; ++i)
            importance[i] =
                PackedImportance(importance[i]).with_larger_share(echo_shares[first + i]).packed();
    });
}

// Collects positions and importance of all entries. Returns whether the entries that were scored
// last are at the same positions.
bool Evictor::gather(const Head& head, const StagedEntries& staged) noexcept {
    const ImportanceSettings& settings = common_.importance();
    const bool by_position = common_.measure().by_position != nullptr;
    const bool predicts = settings.predicts();
    const int n_before = std::exchange(n_scored_, head.count() + staged.count);
    bool same = n_before == n_scored_;
    std::int32_t newest = 0;  // a member would be written for every entry
    head.for_each_page(staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = head.layout().positions(page);
        const float* importance = head.importance_of(page, first);
        float* scores = scores_.data() + first;
        for (int i = 0; i < n; ++i) newest = std::max(newest, positions[i]);
        same = same && std::equal(positions, positions + n, positions_.data() + first);
        std::copy_n(positions, n, positions_.data() + first);
        if (by_position) return;
        if (!predicts) {
            std::copy_n(importance, n, scores);
            return;
        }
        for (int i = 0; i < n; ++i) scores[i] = settings.score_of(importance[i]);
    });
    newest_ = newest;
    return same;
}

// Multiplies scores by the norms of V, squared if the scores are squares.
void Evictor::weigh_by_values(const Head& head, const StagedEntries& staged) noexcept {
    const bool squared = common_.measure().squared;
    head.for_each_page(staged, [&](std::byte* page, int n, int first) {
        const PageLayout& layout = head.layout();
        const float* norms = layout.elsewhere ? layout.value_squares(page) : of_page_.data();
        if (!layout.elsewhere) common_.kernels->value_norms(layout, page, of_page_.data());
        float* scores = scores_.data() + first;
        if (squared) {
            for (int i = 0; i < n; ++i) scores[i] *= norms[i];
        } else {
            for (int i = 0; i < n; ++i) scores[i] *= std::sqrt(norms[i]);
        }
    });
}

// Scores all entries. Afterwards newest_ is the newest position.
void Evictor::score(const Head& head, const StagedEntries& staged) noexcept {
    const bool same = gather(head, staged);
    const auto by_position = common_.measure().by_position;
    const bool by_values = common_.importance().by_values;
    // Heads at the same positions have the same scores then, and one selection serves all of them.
    if (same && by_position != nullptr && !by_values) return;
    selected_ = {};
    if (by_position != nullptr) by_position(positions_.data(), n_scored_, newest_, scores_.data());
    if (by_values) weigh_by_values(head, staged);
    make_finite(scores_.data(), n_scored_);
}

// Measures what the head would lose if it kept, of the scored entries that are not protected, only
// as many as each knot says.
void Evictor::measure_losses(Head& head, int total, std::int32_t newest,
                             float output_squares) noexcept {
    const Protection protection = common_.protection_of(head, newest);
    const bool relative = common_.measure().squared && common_.importance().by_values;
    constexpr float kLeast = std::numeric_limits<float>::min();
    constexpr float kMost = std::numeric_limits<float>::max();
    const float unit = relative && output_squares >= kLeast ? 1.0f / output_squares : 1.0f;
    int n = 0;
    for (int i = 0; i < total; ++i)
        if (protection.leaves_open(positions_[index(i)], newest))
            scratch_[index(n++)] = std::min(scores_[index(i)] * unit, kMost);
    std::sort(scratch_.data(), scratch_.data() + n, std::greater<float>());
    const auto losses = [&](const DroppedScores& dropped, std::vector<float>& at_knots) {
        losses_at(scratch_.data(), n, dropped, unit, common_.knots, at_knots.data());
    };
    losses({}, head.held_losses);
    losses(head.dropped.value_or(DroppedScores{}), head.losses);
}

// Marks in mask_ which entries stay, and returns how many: see select_survivors().
int Evictor::select(int total, int keep, const Protection& protection,
                    std::int32_t newest) noexcept {
    const Protection& last = selected_.protection;
    const bool known = selected_.total == total && selected_.keep == keep &&
                       selected_.newest == newest && last == protection;
    if (known) return selected_.n_kept;
    selected_ = {total, keep, protection, newest, 0};
    return selected_.n_kept = select_survivors(scores_.data(), positions_.data(), total, keep,
                                               protection, newest, mask_.data(), scratch_.data());
}

void Evictor::evict_to_budget(Head& head) noexcept {
    score(head, {});
    keep_highest_scored(head, {}, head.budget(), newest_);
}

void Evictor::keep_highest_scored(Head& head, const StagedEntries& staged, int keep,
                                  std::int32_t newest) noexcept {
    const int total = head.count() + staged.count;
    const Protection protection = common_.protection_of(head, newest);
    int n_kept = select(total, keep, protection, newest);
    // The head is still over its budget, because too many entries are protected: evict sinks and
    // recent entries, too.
    if (n_kept > head.budget()) n_kept = select(total, keep, {0, 0, protection.oldest}, newest);
    if (head.frozen) {
        freezer_.freeze_unmarked(head, staged, newest, mask());
    } else {
        count_dropped(head, total, n_kept, protection);
    }
    head.keep(mask_.data(), staged, *common_.kernels);
}

// Entries that have left the window of their layer are not counted as evicted.
void Evictor::count_dropped(Head& head, int total, int n_kept,
                            const Protection& protection) noexcept {
    int n_left = 0;
    const bool counts_entries = protection.oldest > 0 || head.dropped;
    for (int i = 0; i < total && counts_entries; ++i) {
        const std::int32_t position = positions_[index(i)];
        if (protection.has_left(position)) {
            common_.note_left_window(head.shape(), position);
            ++n_left;
        } else if (head.dropped && mask_[index(i)] == 0) {
            head.dropped->add(scores_[index(i)]);
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
        score(head, staged);
        measure_losses(head, total, newest, output_squares);
    }
    if (!evicts) return head.append(staged, *common_.kernels);
    if (drop_outside_window(head, staged)) return;
    if (!measures) score(head, staged);
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
    std::uint8_t* marks = mask();
    head.for_each_page(staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = head.layout().positions(page);
        for (int i = 0; i < n; ++i) {
            const bool stays = positions[i] >= oldest;
            marks[first + i] = stays ? 1 : 0;
            n_kept += stays ? 1 : 0;
            if (!stays) left = std::max(left, positions[i]);
        }
    });
    if (n_kept > head.budget()) return false;
    if (left >= 0) common_.note_left_window(head.shape(), left);
    head.keep(marks, staged, *common_.kernels);
    return true;
}

}  // namespace entropykv
