#include "store/store_components.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "platform/scratch.hpp"

namespace entropykv {
namespace {

void predict_head(const LayerPredictor& predictor, const StoredInverseRope& inverse_rope,
                  Head& head, int number) {
    const PageLayout& layout = head.layout();
    float row[kMaxHeadDim];
    head.for_each_page({}, [&](std::byte* page, int n, int first) {
        float* importance = head.importance_of(page, first);
        for (int i = 0; i < n; ++i) {
            load_k(layout, page, i, row);
            const float* rotation = inverse_rope.of(layout.positions(page)[i]);
            float predicted = predictor.with_key(number, rotation, row);
            if (predictor.shape->v_dim > 0) {
                load_v(layout, page, i, row);
                predicted = predictor.with_value(number, predicted, row);
            }
            importance[i] = PackedImportance(importance[i])
                                .with_larger_share(PackedImportance(predicted).share())
                                .packed();
        }
    });
}

// Returns the layouts of a layer's heads, which refer to the centres of the settings. Throws
// std::invalid_argument for centres that do not fit the keys, or the measure: |q.k| is not that of
// the model if keys are stored with a centre.
std::vector<PageLayout> head_layouts(const StoreCommon& common, std::size_t layer,
                                     const LayerShape& shape, const PageLayout& layout) {
    const auto n_heads = PageLayout::index(shape.n_head_kv);
    std::vector<PageLayout> layouts(n_heads, layout);
    if (common.settings.key_centres.empty()) return layouts;
    const std::vector<KeyCentre>& centres = common.settings.key_centres.at(layer);
    if (centres.empty()) return layouts;
    const bool fit =
        centres.size() == n_heads && !shape.latent &&
        common.measure().statistic != Statistic::product &&
        std::all_of(centres.begin(), centres.end(), [&](const KeyCentre& each) {
            const auto is_possible = [](float unit) { return unit > 0.0f && std::isfinite(unit); };
            return each.centre.size() == PageLayout::index(shape.k_dim) &&
                   each.unit.size() == each.centre.size() &&
                   std::all_of(each.unit.begin(), each.unit.end(), is_possible);
        });
    if (!fit) throw std::invalid_argument("key centres that do not fit the keys of a layer");
    for (std::size_t head = 0; head < n_heads; ++head) layouts[head].key_centre = &centres[head];
    return layouts;
}

}  // namespace

StoreComponents::StoreComponents(const std::vector<LayerShape>& shapes,
                                 const StoreSettings& settings, std::shared_ptr<StorePool> pool)
    : common(settings),
      share(pool != nullptr
                ? std::move(pool)
                : std::make_shared<StorePool>(shapes, settings.type, settings.max_tokens,
                                              settings.stages_all_layers)) {
    check_settings(settings);
    const std::vector<PageLayout> layouts = page_layouts(shapes, settings.type);
    layers.reserve(shapes.size());  // heads keep pointers into their layer
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        layers.push_back({shapes[i], layouts[i]});
        StoreLayer& layer = layers.back();
        layer.head_layouts = head_layouts(common, i, layer.shape, layer.layout);
        for (const PageLayout& layout : layer.head_layouts)
            layer.heads.emplace_back(layer.shape, layout, share);
        if (settings.counts_dropped && !settings.freezing)
            for (Head& head : layer.heads) head.dropped.emplace();
    }
}

void StoreComponents::size_workspaces(int upcoming) {
    int held = std::max(most_loaded, upcoming);
    std::size_t page_entries = 0;
    for (const StoreLayer& layer : layers) {
        page_entries = std::max(page_entries, PageLayout::index(layer.layout.entries));
        for (const Head& head : layer.heads) held = std::max(held, head.budget());
    }
    const std::size_t n = PageLayout::index(held) + PageLayout::index(common.settings.max_tokens);
    for (Workspace& workspace : workspaces) {
        workspace.evictor.size(n, page_entries);
        if (lessons()) grow(workspace.lesson_rows, lessons()->scratch_values());
        if (!storage) continue;
        workspace.recall.size(n, page_entries, share.page_bytes());
        if (workspace.page_read.size() == 0)
            workspace.page_read = AlignedBytes(storage->page_bytes() + share.page_bytes());
    }
}

std::size_t StoreComponents::scratch_bytes() const {
    std::size_t bytes = sum_over_heads([](const Head& head) {
        return bytes_of(head.pages.copied_importance()) + (head.undo ? head.undo->bytes() : 0);
    });
    for (const Workspace& workspace : workspaces)
        bytes += workspace.evictor.bytes() + workspace.recall.bytes() + workspace.page_read.size() +
                 bytes_of(workspace.lesson_rows);
    for (const std::vector<KeyCentre>& of_layer : common.settings.key_centres)
        for (const KeyCentre& of : of_layer) bytes += bytes_of(of.centre) + bytes_of(of.unit);
    return bytes + inverse_ropes.bytes();
}

void StoreComponents::evict_to_budgets() {
    for_each_head([&](Head& head) {
        if (head.count() > head.budget()) workspaces.front().evictor.evict_to_budget(head);
        head.drop_empty_pages();
    });
    share.note_peak();
}

void StoreComponents::copy_shared_pages() {
    share.pool().make_room([&] {
        return sum_over_heads(
            [](const Head& head) { return head.pages.count_shared(0, head.pages.size()); });
    });
    for_each_head([](Head& head) { head.pages.own_from(0); });
}

void StoreComponents::measure_losses(const std::vector<int>& knots) {
    for (std::size_t i = 0; i < knots.size(); ++i)
        if (knots[i] < 0 || (i > 0 && knots[i] <= knots[i - 1]))
            throw std::invalid_argument("knots must ascend");
    common.knots = knots;
    if (knots.empty()) return;  // the last losses stay readable
    for_each_head([&](Head& head) {
        head.losses.assign(knots.size(), 0.0f);
        head.held_losses.assign(knots.size(), 0.0f);
    });
}

std::vector<double> StoreComponents::last_losses(bool of_held) const {
    std::vector<double> all;
    for (const StoreLayer& layer : layers) {
        for (const Head& head : layer.heads) {
            const std::vector<float>& losses = of_held ? head.held_losses : head.losses;
            all.insert(all.end(), losses.begin(), losses.end());
        }
    }
    return all;
}

FeatureShape StoreComponents::features_of(std::size_t layer) const {
    const LayerShape& shape = layers.at(layer).shape;
    return feature_shape(shape.k_dim, shape.v_dim, shape.latent, common.settings.rope_of(layer));
}

void StoreComponents::prepare_features() {
    const bool needed = has_predictor() || share.pool().lessons;
    if (!common.predicts() || !needed || layers.back().features) return;
    for (std::size_t i = 0; i < layers.size(); ++i) {
        layers[i].features = features_of(i);
        layers[i].inverse_rope = &inverse_ropes.of(common.settings.rope_of(i));
    }
}

void StoreComponents::set_predictor(std::size_t layer, std::vector<float> weights) {
    const std::size_t n =
        layers.at(layer).heads.size() * static_cast<std::size_t>(features_of(layer).n);
    if (!weights.empty() && weights.size() != n)
        throw std::invalid_argument("a predictor's weights must be [n_head_kv][n_features]");
    const auto finite = [](float weight) { return std::isfinite(weight); };
    if (!std::all_of(weights.begin(), weights.end(), finite))
        throw std::invalid_argument("a predictor's weights must be numbers");
    share.pool().predictor().set(layer, std::move(weights));
}

LayerPredictor StoreComponents::predictor(std::size_t layer) const noexcept {
    const StoreLayer& of = layers[layer];
    if (!of.features) return {};
    return {common.kernels, &*of.features, of.inverse_rope, share.pool().predictor().of(layer)};
}

void StoreComponents::predict_stored(std::int32_t n_positions, std::int32_t shift) {
    if (n_positions < 0 || n_positions > kMostPositions || shift < 0 || shift > kMostPositions)
        throw std::invalid_argument("positions and shifts go from 0 to 2^30");
    for_each_head([&](const Head& head) {
        for (int i = 0; i < head.count(); ++i)
            if (head.position(i) >= n_positions)
                throw std::invalid_argument("an entry beyond the positions of the text");
    });
    prepare_features();
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const LayerPredictor predictor = this->predictor(i);
        if (!predictor || predictor.weights == nullptr) continue;
        const StoredInverseRope inverse_rope = stored_inverse_rope(i, 0, n_positions, shift);
        for (std::size_t h = 0; h < layers[i].heads.size(); ++h)
            predict_head(predictor, inverse_rope, layers[i].heads[h], static_cast<int>(h));
    }
}

StoredInverseRope StoreComponents::stored_inverse_rope(std::size_t layer, std::int32_t begin,
                                                       std::int32_t end, std::int32_t shift) const {
    return StoredInverseRope(layers[layer].inverse_rope->rope(), begin, end,
                             common.settings.protection.n_sinks, shift);
}

bool StoreComponents::has_predictor() const noexcept {
    for (std::size_t i = 0; i < layers.size(); ++i)
        if (share.pool().predictor().of(i) == nullptr) return false;
    return true;
}

void StoreComponents::collect_lessons(bool on) {
    if (on && !common.predicts())
        throw std::invalid_argument("lessons are for predictions: use the measure predicted");
    StorePool& pool = share.pool();
    if (on && !pool.lessons) {
        auto sums = std::make_shared<LessonSums>();
        for (std::size_t i = 0; i < layers.size(); ++i)
            sums->add_layer(features_of(i), layers[i].shape.n_head_kv);
        pool.lessons = std::move(sums);
    }
    pool.collects_lessons = on;
}

void StoreComponents::teach_stored(std::int32_t begin, std::int32_t end, std::int32_t shift) {
    if (!collects_lessons()) throw std::invalid_argument("lessons are not collected");
    begin = std::max(begin, common.settings.protection.n_sinks);
    if (end > kMostPositions || shift < 0 || shift > kMostPositions)
        throw std::invalid_argument("positions and shifts go from 0 to 2^30");
    if (begin >= end) return;
    prepare_features();
    size_workspaces();
    float* scratch = workspaces.front().lesson_rows.data();
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const StoredInverseRope inverse_rope = stored_inverse_rope(i, begin, end, shift);
        for (std::size_t h = 0; h < layers[i].heads.size(); ++h)
            share.pool().lessons->add_stored(i, h, layers[i].heads[h], begin, end, inverse_rope,
                                             *common.kernels, scratch);
    }
}

void StoreComponents::clear_lessons() {
    StorePool& pool = share.pool();
    if (pool.collects_lessons) return pool.lessons->clear();
    pool.lessons.reset();
    for (Workspace& workspace : workspaces) std::vector<float>().swap(workspace.lesson_rows);
}

void StoreComponents::add_lessons(std::size_t layer, std::size_t head, const StagedEntries& staged,
                                  const float* observed, Workspace& workspace) noexcept {
    const StoreLayer& of = layers[layer];
    share.pool().lessons->add(layer, head, of.heads[head].layout(), staged, *of.inverse_rope,
                              observed, common.settings.protection.n_sinks, *common.kernels,
                              workspace.lesson_rows.data());
}

}  // namespace entropykv
