#include "store/store_parts.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "platform/scratch.hpp"

namespace entropykv {

StoreParts::StoreParts(const std::vector<LayerShape>& shapes, const StoreSettings& settings,
                       std::shared_ptr<StorePool> pool)
    : common(settings),
      share(pool != nullptr
                ? std::move(pool)
                : std::make_shared<StorePool>(shapes, settings.type, settings.max_tokens)),
      queries(common, turns) {
    check_settings(settings);
    const std::vector<PageLayout> layouts = page_layouts(shapes, settings.type);
    layers.reserve(shapes.size());  // heads know where their layer is
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        layers.push_back({shapes[i], layouts[i]});
        StoreLayer& layer = layers.back();
        for (int h = 0; h < shapes[i].n_head_kv; ++h)
            layer.heads.emplace_back(layer.shape, layer.layout, share);
        if (settings.counts_dropped && !settings.freezing)
            for (Head& head : layer.heads) head.dropped.emplace();
        if (queries.follows()) queries.follow(i, layer.heads);
    }
    if (common.predicts()) look_at_features();
}

void StoreParts::size_workspaces(int upcoming) {
    int held = std::max(most_loaded, upcoming);
    std::size_t page_entries = 0;
    std::size_t key_values = 0;
    for (const StoreLayer& layer : layers) {
        page_entries = std::max(page_entries, PageLayout::index(layer.layout.entries));
        key_values = std::max(key_values, PageLayout::index(layer.layout.k_stride));
        for (const Head& head : layer.heads) held = std::max(held, head.budget());
    }
    const std::size_t n = PageLayout::index(held) + PageLayout::index(common.settings.max_tokens);
    for (Workspace& workspace : workspaces) {
        workspace.ranking.size(n, page_entries, key_values);
        if (lessons) grow(workspace.lesson_rows, lessons->scratch_values());
        if (!storage) continue;
        workspace.recall.size(n, page_entries, share.page_bytes());
        if (workspace.page_read.size() == 0)
            workspace.page_read = AlignedBytes(storage->page_bytes() + share.page_bytes());
    }
}

std::size_t StoreParts::scratch_bytes() const {
    std::size_t bytes =
        total([](const Head& head) { return bytes_of(head.pages.copied_importance()); });
    for (const Workspace& workspace : workspaces)
        bytes += workspace.ranking.bytes() + workspace.recall.bytes() + workspace.page_read.size() +
                 bytes_of(workspace.lesson_rows);
    return bytes + turns.bytes() + (lessons ? lessons->bytes() : 0);
}

void StoreParts::keep_budgets() {
    over_heads([&](Head& head) {
        if (head.count() > head.budget()) workspaces.front().keeper.keep_best(head);
        head.drop_empty_pages();
    });
    share.note_peak();
}

void StoreParts::own_all() {
    share.pool().make_room([&] {
        return total([](const Head& head) { return head.pages.foreign(0, head.pages.size()); });
    });
    over_heads([](Head& head) { head.pages.own_from(0); });
}

FeatureShape StoreParts::features_of(std::size_t layer) const {
    const LayerShape& shape = layers.at(layer).shape;
    return feature_shape(shape.k_dim, shape.v_dim, shape.latent, common.settings.rope_of(layer));
}

void StoreParts::look_at_features() {
    for (std::size_t i = 0; i < layers.size(); ++i) {
        layers[i].features = features_of(i);
        layers[i].turns = &turns.of(common.settings.rope_of(i));
    }
}

void StoreParts::set_predictor(std::size_t layer, std::vector<float> weights) {
    const std::size_t n =
        layers.at(layer).heads.size() * static_cast<std::size_t>(features_of(layer).n);
    if (!weights.empty() && weights.size() != n)
        throw std::invalid_argument("a predictor's weights must be [n_head_kv][n_features]");
    const auto finite = [](float weight) { return std::isfinite(weight); };
    if (!std::all_of(weights.begin(), weights.end(), finite))
        throw std::invalid_argument("a predictor's weights must be numbers");
    share.pool().predictor().set(layer, std::move(weights));
}

LayerPredictor StoreParts::predictor(std::size_t layer) const noexcept {
    if (!common.predicts()) return {};
    return {common.kernels, &*layers[layer].features, layers[layer].turns,
            share.pool().predictor().of(layer)};
}

bool StoreParts::has_predictor() const noexcept {
    for (std::size_t i = 0; i < layers.size(); ++i)
        if (share.pool().predictor().of(i) == nullptr) return false;
    return true;
}

void StoreParts::collect_lessons(bool on) {
    if (on && !common.predicts())
        throw std::invalid_argument("lessons are for predictions: use the measure predicted");
    if (on && !lessons) {
        LessonSums sums;
        for (const StoreLayer& layer : layers)
            sums.add_layer(*layer.features, layer.shape.n_head_kv);
        lessons = std::move(sums);
    }
    if (on) size_workspaces();
    collects_lessons = on;
}

void StoreParts::clear_lessons() {
    if (collects_lessons) return lessons->clear();
    lessons.reset();
    for (Workspace& workspace : workspaces) std::vector<float>().swap(workspace.lesson_rows);
}

void StoreParts::teach(std::size_t layer, std::size_t head, const StagedEntries& staged,
                       const float* observed, Workspace& workspace) noexcept {
    const StoreLayer& of = layers[layer];
    lessons->add(layer, head, of.layout, staged, *of.turns, observed,
                 common.settings.protection.n_sinks, *common.kernels, workspace.lesson_rows.data());
}

}  // namespace entropykv
