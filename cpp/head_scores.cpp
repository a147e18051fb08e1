// How the entries of a head are ranked: what queries gave them, and the scores of an eviction.
#include <algorithm>
#include <cmath>

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

}  // namespace entropykv
