// What a store is made of: HeadStore owns it, and what forks, freezes, saves and loads its heads
// works on it.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "store/keeper.hpp"
#include "store/layer_predictor.hpp"
#include "store/lesson_sums.hpp"
#include "store/page_share.hpp"
#include "store/query_follower.hpp"
#include "store/recall.hpp"
#include "store/schedule.hpp"

namespace entropykv {

struct StoreLayer {
    LayerShape shape;
    PageLayout layout;
    std::vector<Head> heads{};
    std::unique_ptr<ColdLayout> cold{};  // none where nothing of it is frozen
    // What entries are told by, and what turns their keys back, where that is asked for.
    std::optional<FeatureShape> features{};
    const TurnsBack* turns = nullptr;
};

// What one thread works with while it commits, or recalls.
struct Workspace {
    explicit Workspace(StoreCommon& common)
        : ranking(common), keeper(common, ranking), recall(common), schedule(common) {}

    Ranking ranking;
    Keeper keeper;
    Recall recall;
    Schedule schedule;
    AlignedBytes page_read{};  // of cold storage, and what it is unpacked to
    std::vector<float> lesson_rows{};
};

struct StoreParts {
    StoreParts(const std::vector<LayerShape>& shapes, const StoreSettings& settings,
               std::shared_ptr<StorePool> pool);

    Head& head(int layer, int head) {
        return layers.at(static_cast<std::size_t>(layer)).heads.at(static_cast<std::size_t>(head));
    }
    const Head& head(int layer, int number) const {
        return const_cast<StoreParts*>(this)->head(layer, number);
    }
    std::size_t n_heads() const {
        return total([](const Head&) { return std::size_t{1}; });
    }
    // visit(head) for every head, all layers in order; and the sum of what it returns.
    template <typename Visit>
    void over_heads(Visit visit) {
        for (StoreLayer& layer : layers)
            for (Head& head : layer.heads) visit(head);
    }
    template <typename OfHead>
    std::size_t total(OfHead of_head) const {
        std::size_t sum = 0;
        for (const StoreLayer& layer : layers)
            for (const Head& head : layer.heads) sum += of_head(head);
        return sum;
    }

    // Workspaces for heads of as many entries as their budgets hold, or an upcoming one, or
    // most_loaded, and those of a micro-batch.
    void size_workspaces(int upcoming = 0);
    // Of all of them, and of importance besides the pages; not of staging.
    std::size_t scratch_bytes() const;
    // Evicts from heads that hold more than their budgets.
    void keep_budgets();
    // Copies all pages that others own, too.
    void own_all();

    // Looks at the features of all layers, once a predictor or lessons need them: before every
    // micro-batch. Throws as features_of().
    void look_at_features();
    // The features of a layer's entries. Throws std::invalid_argument where the RoPE of the
    // settings does not fit its keys.
    FeatureShape features_of(std::size_t layer) const;
    // The linear functions of a layer, [KV head][feature], or none: of all stores of the pool.
    // Throws std::invalid_argument for another number of them, or what is no number.
    void set_predictor(std::size_t layer, std::vector<float> weights);
    LayerPredictor predictor(std::size_t layer) const noexcept;
    // Whether every layer has such functions.
    bool has_predictor() const noexcept;
    // Predicts the shares of entries that were stored before there was a predictor: of a text of
    // so many positions, which RoPE sees by this shift (rope_position()). Throws
    // std::invalid_argument where an entry is not of such a text, and as features_of().
    void predict_stored(std::int32_t n_positions, std::int32_t shift);
    // Of all stores of the pool, from the next micro-batch on, or no more; what was collected stays
    // until it is cleared.
    void collect_lessons(bool on);
    // Adds lessons of the stored entries at positions from `begin` to before `end`, which an echo
    // has repeated; those of the sinks are left out. shift: as for predict_stored().
    void teach_stored(std::int32_t begin, std::int32_t end, std::int32_t shift);
    void clear_lessons();
    // Those of the pool, or null.
    const LessonSums* lessons() const { return share.pool().lessons.get(); }
    bool collects_lessons() const { return share.pool().collects_lessons; }
    // Adds the staged entries of a head that an echo has looked up.
    void teach(std::size_t layer, std::size_t head, const StagedEntries& staged,
               const float* observed, Workspace& workspace) noexcept;

    // Turns for the stored keys of a layer, see StoredTurns. The layer's features are known.
    StoredTurns stored_turns(std::size_t layer, std::int32_t begin, std::int32_t end,
                             std::int32_t shift) const;

    StoreCommon common;
    PageShare share;
    std::vector<StoreLayer> layers;
    RopeTurns turns{};
    QueryFollower queries;
    std::unique_ptr<ColdStorage> storage;
    std::deque<Workspace> workspaces{};
    int most_loaded = 0;  // entries of a head in the states that are being loaded
};

}  // namespace entropykv
