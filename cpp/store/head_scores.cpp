// How the entries of a head are ranked: what queries gave them, and the scores of an eviction.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "decide/budget.hpp"
#include "decide/redundancy.hpp"
#include "platform/scratch.hpp"
#include "store/head_store.hpp"

namespace entropykv {

void HeadStore::set_workers(int n_workers, const KernelTable& kernels) {
    kernels_ = &kernels;
    workspaces_.resize(index(std::max(n_workers, 1)));
    size_workspaces();
}

// For heads of as many entries as their budgets hold, or the states that are being loaded, and
// those of a micro-batch.
void HeadStore::size_workspaces() {
    int held = most_loaded_;
    std::size_t most_of_page = 0;
    std::size_t most_of_key = 0;
    for (const Layer& layer : layers_) {
        most_of_page = std::max(most_of_page, index(layer.layout.entries));
        most_of_key = std::max(most_of_key, index(layer.layout.k_stride));
        for (const Head& head : layer.heads) held = std::max(held, head.budget);
    }
    const std::size_t n = index(held) + index(settings_.max_tokens);
    for (Workspace& workspace : workspaces_) {
        fit(workspace.positions, n);
        fit(workspace.scores, n);
        fit(workspace.scratch, n);
        fit(workspace.kept, n);
        fit(workspace.of_page, most_of_page);
        fit(workspace.mean, most_of_key);
        fit(workspace.half_variance, most_of_key);
        size_for_recall(workspace, n);
        if (!settings_.importance.distinct) continue;
        fit(workspace.order, n);
        fit(workspace.keys, most_of_key * kContest);
    }
}

std::size_t HeadStore::workspace_bytes() const {
    std::size_t bytes = total([](const Head& head) { return bytes_of(head.importance); });
    for (const Workspace& w : workspaces_)
        bytes += bytes_of(w.positions) + bytes_of(w.scores) + bytes_of(w.scratch) +
                 bytes_of(w.of_page) + bytes_of(w.mean) + bytes_of(w.half_variance) +
                 bytes_of(w.order) + bytes_of(w.keys) + bytes_of(w.kept) + bytes_of(w.logits) +
                 bytes_of(w.masses) + bytes_of(w.active_needs) + bytes_of(w.victims) +
                 bytes_of(w.needs) + bytes_of(w.best) + bytes_of(w.incoming) + w.page_read.size() +
                 w.aside.size();
    return bytes;
}

void HeadStore::follow_queries(Layer& layer, std::size_t number) {
    const LayerShape& shape = layer.shape;
    const RopeParams rope = settings_.ropes.empty() ? RopeParams{} : settings_.ropes.at(number);
    if (!fits(rope, shape.k_dim))
        throw std::invalid_argument("RoPE parameters that do not fit the queries of a layer");
    while (layer.turns < turns_.size() && !(turns_[layer.turns].rope() == rope)) ++layer.turns;
    if (layer.turns == turns_.size()) turns_.emplace_back(rope);
    for (Head& head : layer.heads)
        head.queries = QueryStatistics(shape.n_head / shape.n_head_kv, shape.k_dim);
}

void HeadStore::prepare_queries(std::int32_t rope_position, int n_tokens) {
    rope_position_ = rope_position;
    for (TurnsBack& turns : turns_) turns.prepare(rope_position, n_tokens);
}

namespace {

// Where norms and queries are beyond what floats hold, a score is no number, which nothing can be
// ranked by.
void make_finite(float* scores, int n) {
    for (int i = 0; i < n; ++i)
        scores[i] =
            scores[i] > 0.0f ? std::min(scores[i], std::numeric_limits<float>::max()) : 0.0f;
}

}  // namespace

void HeadStore::add_observed(const Layer& layer, Head& head, int head_index, int n_staged,
                             const float* observed) noexcept {
    // A single query stands for those since the last one that counted; its neighbourhood is left
    // out here, that of a prompt's queries was already.
    const float factor =
        decay_factor(settings_.importance.decay, single_query_ ? scoring_interval() : n_staged);
    const bool largest = settings_.importance.measure().by_largest();
    const float weight = single_query_ ? static_cast<float>(scoring_interval()) : 1.0f;
    const std::int32_t limit = single_query_ ? newest_ - neighbourhood() : newest_;
    over_pages(layer, head, head_index, n_staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = layer.layout.positions(page);
        float* importance = importance_of(layer, head, page, first);
        for (int i = 0; i < n; ++i) {
            const float kept = importance[i] * factor;
            const float given = positions[i] <= limit ? observed[first + i] : 0.0f;
            const float next = largest ? std::max(kept, given) : kept + weight * given;
            // Of queries that are no numbers, or too large for them, nothing is to be learnt.
            importance[i] = next <= std::numeric_limits<float>::max() ? next : kept;
        }
    });
}

// Positions and importance of stored and staged entries; returns the newest position.
std::int32_t HeadStore::gather(const Layer& layer, const Head& head, int head_index, int n_staged,
                               Workspace& workspace) const noexcept {
    std::int32_t newest = 0;
    over_pages(layer, head, head_index, n_staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = layer.layout.positions(page);
        const float* importance = importance_of(layer, head, page, first);
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
    if (const auto by_position = settings.measure().by_position)
        return by_position(position, newest, settings.variation);
    return settings.by_exposure ? importance / exposure(newest - position, settings) : importance;
}

// Scores times the norms of V, squared where the scores are.
void HeadStore::weigh_by_values(const Layer& layer, const Head& head, int head_index, int n_staged,
                                Workspace& workspace) const noexcept {
    const bool squared = settings_.importance.measure().squared;
    over_pages(layer, head, head_index, n_staged, [&](std::byte* page, int n, int first) {
        float* norms = workspace.of_page.data();
        kernels_->value_norms(layer.layout, page, norms);
        for (int i = 0; i < n; ++i)
            workspace.scores[index(first + i)] *= squared ? norms[i] : std::sqrt(norms[i]);
    });
}

// Adds the softmax of workspace.scratch over the entries that are no sinks to the scores.
void HeadStore::add_softmax(int n, Workspace& workspace) const noexcept {
    const int n_sinks = settings_.protection.n_sinks;
    const auto counts = [&](int i) { return workspace.positions[index(i)] >= n_sinks; };
    float* logits = workspace.scratch.data();
    float max = kMaskedLogit;
    for (int i = 0; i < n; ++i)
        if (counts(i)) max = std::max(max, logits[i]);
    float sum = 0.0f;
    for (int i = 0; i < n; ++i) {
        logits[i] = counts(i) ? std::exp(logits[i] - max) : 0.0f;
        sum += logits[i];
    }
    const float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
    for (int i = 0; i < n; ++i) workspace.scores[index(i)] += logits[i] * scale;
}

// Scores by expected attention, summed over the query heads.
void HeadStore::expect(const Layer& layer, const Head& head, int head_index, int n_staged,
                       Workspace& workspace) const noexcept {
    const int total = head.count + n_staged;
    std::fill_n(workspace.scores.begin(), total, 0.0f);
    for (int g = 0; g < layer.shape.n_head / layer.shape.n_head_kv; ++g) {
        float* mean = workspace.mean.data();
        float* half_variance = workspace.half_variance.data();
        std::fill(mean, mean + layer.layout.k_stride, 0.0f);
        std::fill(half_variance, half_variance + layer.layout.k_stride, 0.0f);
        head.queries.expect(g, turns_[layer.turns], settings_.importance.future_positions, mean,
                            half_variance);
        over_pages(layer, head, head_index, n_staged, [&](std::byte* page, int n, int first) {
            float* logits = workspace.of_page.data();
            kernels_->expected_logits(layer.layout, page, mean, half_variance, logits);
            std::copy(logits, logits + n, workspace.scratch.begin() + first);
        });
        add_softmax(total, workspace);
    }
}

// Lowers the scores of entries that a newer one of those at stake is similar to.
void HeadStore::weigh_by_distinctness(const Layer& layer, const Head& head, int head_index,
                                      int total, int keep, std::int32_t newest,
                                      Workspace& workspace) const noexcept {
    std::int32_t* order = workspace.order.data();
    const int n = find_contest(workspace.scores.data(), workspace.positions.data(), total, keep,
                               protection_of(layer, head, newest), newest, order);
    if (n == 0) return;
    const int dim = layer.shape.k_dim;
    float* keys = workspace.keys.data();
    float row[kMaxHeadDim];
    for (int d = 0; d < dim; ++d) std::fill_n(keys + d * kContest, kContest, 0.0f);
    for (int j = 0; j < n; ++j) {
        const int i = order[j];
        const Slot slot = i < head.count ? stored_slot(layer, head, i)
                                         : staged_slot(layer, head_index, i - head.count);
        load_k(layer.layout, slot.page, slot.index, row);
        normalise(row, dim);
        for (int d = 0; d < dim; ++d) keys[d * kContest + j] = row[d];
    }
    float* cosines = workspace.scratch.data();
    kernels_->newer_cosines(keys, n, dim, cosines);
    for (int j = 0; j < n; ++j) workspace.scores[index(order[j])] *= distinctness(cosines[j]);
}

std::int32_t HeadStore::score(const Layer& layer, const Head& head, int head_index, int n_staged,
                              int keep, Workspace& workspace) const noexcept {
    const ImportanceSettings& settings = settings_.importance;
    const std::int32_t newest = gather(layer, head, head_index, n_staged, workspace);
    const int total = head.count + n_staged;
    if (settings.measure().evidence == Evidence::expectation) {
        expect(layer, head, head_index, n_staged, workspace);
    } else {
        for (int i = 0; i < total; ++i)
            workspace.scores[index(i)] =
                score_of(workspace.positions[index(i)], newest, workspace.scores[index(i)]);
    }
    if (settings.by_values) weigh_by_values(layer, head, head_index, n_staged, workspace);
    make_finite(workspace.scores.data(), total);
    if (settings.distinct) {
        weigh_by_distinctness(layer, head, head_index, total, keep, newest, workspace);
        make_finite(workspace.scores.data(), total);
    }
    return newest;
}

void HeadStore::measure_losses(const std::vector<int>& knots) {
    for (std::size_t i = 0; i < knots.size(); ++i)
        if (knots[i] < 0 || (i > 0 && knots[i] <= knots[i - 1]))
            throw std::invalid_argument("knots must ascend");
    knots_ = knots;
    if (knots.empty()) return;  // what was measured stays
    for (Layer& layer : layers_)
        for (Head& head : layer.heads) head.losses.assign(knots.size(), 0.0f);
}

// The losses of a head whose `total` entries were scored.
void HeadStore::measure(const Layer& layer, Head& head, int total, std::int32_t newest,
                        float output_squares, Workspace& workspace) const noexcept {
    const Protection protection = protection_of(layer, head, newest);
    const ImportanceSettings& importance = settings_.importance;
    const bool relative = importance.measure().squared && importance.by_values;
    constexpr float kLeast = std::numeric_limits<float>::min();
    constexpr float kMost = std::numeric_limits<float>::max();
    const float unit = relative && output_squares >= kLeast ? 1.0f / output_squares : 1.0f;
    int n = 0;
    for (int i = 0; i < total; ++i)
        if (protection.leaves_open(workspace.positions[index(i)], newest))
            workspace.scratch[index(n++)] = std::min(workspace.scores[index(i)] * unit, kMost);
    losses_at(workspace.scratch.data(), n, knots_, head.losses.data());
    for (float& loss : head.losses) loss = std::min(loss, kMost);
}

std::vector<double> HeadStore::losses() const {
    std::vector<double> all;
    for (const Layer& layer : layers_)
        for (const Head& head : layer.heads)
            all.insert(all.end(), head.losses.begin(), head.losses.end());
    return all;
}

}  // namespace entropykv
