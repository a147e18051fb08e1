#include "store/scorer.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

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

}  // namespace

void Scorer::size(std::size_t n, std::size_t page_entries) {
    fit(positions_, n);
    fit(scores_, n);
    fit(scratch_, n);
    fit(mask_, n);
    fit(of_page_, page_entries);
}

std::size_t Scorer::bytes() const {
    return bytes_of(positions_) + bytes_of(scores_) + bytes_of(scratch_) + bytes_of(of_page_) +
           bytes_of(mask_);
}

void Scorer::add_observed(Head& head, const StagedEntries& staged,
                          const float* observed) const noexcept {
    // Of single tokens only every interval-th query counts, on behalf of all since the last one.
    // Entries in its neighbourhood are left out here; for the queries of a chunk, the kernels leave
    // them out.
    const bool single = common_.single_query;
    const int interval = common_.scoring_interval();
    const float factor = decay_factor(common_.importance().decay, single ? interval : staged.count);
    if (head.dropped) head.dropped->decay(factor);
    const bool largest = common_.measure().by_largest();
    const bool packed = common_.predicts();
    const float weight = single ? static_cast<float>(interval) : 1.0f;
    const std::int32_t limit = single ? staged.newest - common_.neighbourhood() : staged.newest;
    head.for_each_page(staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = head.layout().positions(page);
        float* importance = head.importance_of(page, first);
        for (int i = 0; i < n; ++i) {
            const float so_far = packed ? PackedImportance(importance[i]).given() : importance[i];
            const float kept = so_far * factor;
            const float given = positions[i] <= limit ? observed[first + i] : 0.0f;
            const float next = largest ? std::max(kept, given) : kept + weight * given;
            // Queries that are not numbers, or are too large for floats, must not change the
            // importance.
            const float sum = next <= std::numeric_limits<float>::max() ? next : kept;
            importance[i] = packed ? PackedImportance(importance[i]).with_given(sum).packed() : sum;
        }
    });
}

void Scorer::raise_predicted_shares(Head& head, const StagedEntries& staged,
                                    const float* echo_shares) const noexcept {
    head.for_each_page(staged, [&](std::byte* page, int n, int first) {
        float* importance = head.importance_of(page, first);
        for (int i = 0; i < n; ++i)
            importance[i] =
                PackedImportance(importance[i]).with_larger_share(echo_shares[first + i]).packed();
    });
}

// Collects positions and importance of all entries.
void Scorer::gather(const Head& head, const StagedEntries& staged) noexcept {
    newest_ = 0;
    const ImportanceSettings& settings = common_.importance();
    // The setting is read once, because the loop runs for every entry at every token.
    const bool predicts = settings.predicts();
    head.for_each_page(staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = head.layout().positions(page);
        const float* importance = head.importance_of(page, first);
        for (int i = 0; i < n; ++i) {
            newest_ = std::max(newest_, positions[i]);
            positions_[index(first + i)] = positions[i];
            scores_[index(first + i)] = predicts ? settings.score_of(importance[i]) : importance[i];
        }
    });
}

// Computes scores from positions, or leaves the importance that scores_ holds already.
void Scorer::score_separately(int n) noexcept {
    const ImportanceSettings& settings = common_.importance();
    if (const auto by_position = settings.measure().by_position) {
        for (int i = 0; i < n; ++i) scores_[index(i)] = by_position(positions_[index(i)], newest_);
    }
}

// Multiplies scores by the norms of V, squared if the scores are squares.
void Scorer::weigh_by_values(const Head& head, const StagedEntries& staged) noexcept {
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

void Scorer::score(const Head& head, const StagedEntries& staged) noexcept {
    const ImportanceSettings& settings = common_.importance();
    const int total = head.count() + staged.count;
    gather(head, staged);
    score_separately(total);
    if (settings.by_values) weigh_by_values(head, staged);
    make_finite(scores_.data(), total);
}

void Scorer::measure_losses(Head& head, int total, std::int32_t newest,
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

int Scorer::select(int total, int keep, const Protection& protection,
                   std::int32_t newest) noexcept {
    return select_survivors(scores_.data(), positions_.data(), total, keep, protection, newest,
                            mask_.data(), scratch_.data());
}

}  // namespace entropykv
