// How the entries of a head are ranked: what queries gave them, and the scores of an eviction.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "budget.hpp"
#include "head_store.hpp"

namespace entropykv {

// Visits the pages of a head's stored entries, then those of its staged ones: page, how many
// entries of it count, and how many came before.
template <typename Visit>
void HeadStore::over_pages(const Layer& layer, const Head& head, int head_index, int n_staged,
                           Visit visit) const {
    const int per_page = layer.layout.entries;
    for (int first = 0; first < head.count; first += per_page)
        visit(head.pages[index(first / per_page)], std::min(per_page, head.count - first), first);
    for (int first = 0; first < n_staged; first += per_page)
        visit(staging(head_index)[first / per_page], std::min(per_page, n_staged - first),
              head.count + first);
}

void HeadStore::add_observed(const Layer& layer, const Head& head, int head_index, int n_staged,
                             const float* observed) noexcept {
    // A single query stands for those since the last one that counted; its neighbourhood is left
    // out here, that of a prompt's queries was already.
    const bool single = n_staged == 1;
    const float factor =
        decay_factor(settings_.importance.decay, single ? kScoringInterval : n_staged);
    const float weight = single ? static_cast<float>(kScoringInterval) : 1.0f;
    const Slot last = staged_slot(layer, head_index, n_staged - 1);
    const std::int32_t newest = layer.layout.positions(last.page)[last.index];
    const std::int32_t limit = single ? newest - kNeighbourhood : newest;
    over_pages(layer, head, head_index, n_staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = layer.layout.positions(page);
        float* importance = layer.layout.importance(page);
        for (int i = 0; i < n; ++i)
            importance[i] = importance[i] * factor +
                            (positions[i] <= limit ? weight * observed[first + i] : 0.0f);
    });
}

// Positions and importance of stored and staged entries; returns the newest position.
std::int32_t HeadStore::gather(const Layer& layer, const Head& head, int head_index, int n_staged,
                               Workspace& workspace) const noexcept {
    std::int32_t newest = 0;
    over_pages(layer, head, head_index, n_staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = layer.layout.positions(page);
        const float* importance = layer.layout.importance(page);
        for (int i = 0; i < n; ++i) {
            newest = std::max(newest, positions[i]);
            workspace.positions[index(first + i)] = positions[i];
            workspace.scores[index(first + i)] = importance[i];
        }
    });
    return newest;
}

// The score of an entry by itself: of its position, or of what it was given (its importance).
float HeadStore::score_of(std::int32_t position, std::int32_t newest,
                          float importance) const noexcept {
    const ImportanceSettings& settings = settings_.importance;
    if (settings.kind == ScoreKind::streaming) return static_cast<float>(position);
    if (settings.kind == ScoreKind::recency)
        return recency_score(position, newest, settings.variation);
    return settings.by_exposure ? importance / exposure(newest - position, settings) : importance;
}

// Scores times the norms of V, squared where the scores are.
void HeadStore::weigh_by_values(const Layer& layer, const Head& head, int head_index, int n_staged,
                                Workspace& workspace) const noexcept {
    const bool squared = settings_.importance.kind == ScoreKind::mass;
    over_pages(layer, head, head_index, n_staged, [&](std::byte* page, int n, int first) {
        float* norms = workspace.norms.data();
        kernels_->value_norms(layer.layout, page, norms);
        for (int i = 0; i < n; ++i)
            workspace.scores[index(first + i)] *= squared ? norms[i] : std::sqrt(norms[i]);
    });
}

std::int32_t HeadStore::score(const Layer& layer, const Head& head, int head_index, int n_staged,
                              Workspace& workspace) const noexcept {
    const std::int32_t newest = gather(layer, head, head_index, n_staged, workspace);
    const int total = head.count + n_staged;
    for (int i = 0; i < total; ++i)
        workspace.scores[index(i)] =
            score_of(workspace.positions[index(i)], newest, workspace.scores[index(i)]);
    if (settings_.importance.by_values)
        weigh_by_values(layer, head, head_index, n_staged, workspace);
    return newest;
}

void HeadStore::measure_losses(const std::vector<int>& knots) {
    for (std::size_t i = 0; i < knots.size(); ++i)
        if (knots[i] < 0 || (i > 0 && knots[i] <= knots[i - 1]))
            throw std::invalid_argument("knots must ascend");
    knots_ = knots;
    for (Layer& layer : layers_)
        for (Head& head : layer.heads) head.losses.assign(knots.size(), 0.0f);
}

void HeadStore::measure(const Layer& layer, Head& head, int head_index, int n_staged,
                        float output_squares, Workspace& workspace) noexcept {
    const std::int32_t newest = score(layer, head, head_index, n_staged, workspace);
    const Protection protection = protection_of(head);
    const ImportanceSettings& importance = settings_.importance;
    const bool relative = importance.kind == ScoreKind::mass && importance.by_values;
    const float unit = relative && output_squares > 0.0f ? 1.0f / output_squares : 1.0f;
    int n = 0;
    for (int i = 0; i < head.count + n_staged; ++i)
        if (!protection.covers(workspace.positions[index(i)], newest))
            workspace.scratch[index(n++)] = workspace.scores[index(i)] * unit;
    losses_at(workspace.scratch.data(), n, knots_, head.losses.data());
}

std::vector<double> HeadStore::losses() const {
    std::vector<double> all;
    for (const Layer& layer : layers_)
        for (const Head& head : layer.heads)
            all.insert(all.end(), head.losses.begin(), head.losses.end());
    return all;
}

}  // namespace entropykv
