// Holds the components of a store. HeadStore owns them; the code that forks, freezes, saves and
// loads heads works on them, too.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "store/evictor.hpp"
#include "store/lesson_sums.hpp"
#include "store/predictor.hpp"
#include "store/recall.hpp"
#include "store/store_pool.hpp"

namespace entropykv {

struct StoreLayer {
    LayerShape shape;
    PageLayout layout;
    // Holds the layout of every KV head, with its key centre if its keys are stored with one.
    std::vector<PageLayout> head_layouts{};
    std::vector<Head> heads{};
    std::unique_ptr<ColdLayout> cold{};  // null: nothing of the layer is ever frozen
    // Hold where the features of the layer's entries lie, and the inverse of its RoPE, once a
    // predictor or lessons need them.
    std::optional<FeatureShape> features{};
    const InverseRope* inverse_rope = nullptr;
};

// Holds what one thread uses to recall for a head and to commit it.
struct Workspace {
    explicit Workspace(StoreCommon& common) : evictor(common), recall(common), schedule(common) {}

    Evictor evictor;
    Recall recall;
    Schedule schedule;
    AlignedBytes page_read{};  // a page of cold storage, packed and unpacked
    std::vector<float> lesson_rows{};
};

struct StoreComponents {
    StoreComponents(const std::vector<LayerShape>& shapes, const StoreSettings& settings,
                    std::shared_ptr<StorePool> pool);

    Head& head(int layer, int head) {
        return layers.at(static_cast<std::size_t>(layer)).heads.at(static_cast<std::size_t>(head));
    }
    const Head& head(int layer, int number) const {
        return const_cast<StoreComponents*>(this)->head(layer, number);
    }
    std::size_t n_heads() const {
        return sum_over_heads([](const Head&) { return std::size_t{1}; });
    }
    // for_each_head() calls visit(head) for the heads of all layers in order; sum_over_heads() adds
    // up what of_head(head) returns.
    template <typename Visit>
    void for_each_head(Visit visit) {
        for (StoreLayer& layer : layers)
            for (Head& head : layer.heads) visit(head);
    }
    template <typename OfHead>
    std::size_t sum_over_heads(OfHead of_head) const {
        std::size_t sum = 0;
        for (const StoreLayer& layer : layers)
            for (const Head& head : layer.heads) sum += of_head(head);
        return sum;
    }

    // Sizes the workspaces for a micro-batch, and for heads with as many entries as the largest of
    // their budgets, `upcoming` and most_loaded.
    void size_workspaces(int upcoming = 0);
    // Counts the bytes of workspaces, undo logs, key centres, rotations of RoPE, and importance
    // that is kept outside of shared pages; the staging area is not included.
    std::size_t scratch_bytes() const;
    void evict_to_budgets();
    // Copies all pages that have other owners, so that they can be written to. Throws
    // std::logic_error if the pool has no pages for the copies.
    void copy_shared_pages();

    // From the next micro-batch on, measures what each head would have lost if it had kept, beyond
    // the protected entries, only as many as each knot says. No knots: nothing is measured. Throws
    // std::invalid_argument unless knots ascend from 0 or more.
    void measure_losses(const std::vector<int>& knots);
    // Returns the losses that the last such micro-batch measured, [KV head of all layers][knot]:
    // the sums of the scores of all entries that would not be kept, divided by the head's squared
    // outputs if scores are squares that include values. of_held: without entries that were dropped
    // before.
    std::vector<double> last_losses(bool of_held) const;

    // Sets the features of all layers once a predictor or lessons need them. Called before every
    // micro-batch; throws like features_of().
    void prepare_features();
    // Returns the features of a layer's entries. Throws std::invalid_argument if the RoPE of the
    // settings does not fit the layer's keys.
    FeatureShape features_of(std::size_t layer) const;
    // Set or return the linear functions of a layer, [KV head][feature], or none, for all stores of
    // the pool. set_predictor() throws std::invalid_argument if their number is wrong or a weight
    // is not finite.
    void set_predictor(std::size_t layer, std::vector<float> weights);
    LayerPredictor predictor(std::size_t layer) const noexcept;
    // Tells whether every layer has linear functions that predict scores.
    bool has_predictor() const noexcept;
    // Predicts the shares of entries that were stored before there was a predictor. The text has
    // n_positions positions, and RoPE sees them moved by `shift` (rope_position()). Throws
    // std::invalid_argument if an entry lies beyond the text, and like features_of().
    void predict_stored(std::int32_t n_positions, std::int32_t shift);
    // Starts or stops collecting lessons in all stores of the pool, from the next micro-batch on;
    // clear_lessons() drops what was collected. Throws std::invalid_argument for measures that
    // predict nothing, and like features_of().
    void collect_lessons(bool on);
    // Adds lessons of the stored entries at the positions [begin, end), which an echo has repeated.
    // Sinks are left out. shift: as for predict_stored(). Throws std::invalid_argument if lessons
    // are not collected, or for numbers above 2^30.
    void teach_stored(std::int32_t begin, std::int32_t end, std::int32_t shift);
    void clear_lessons();
    const LessonSums* lessons() const { return share.pool().lessons.get(); }
    bool collects_lessons() const { return share.pool().collects_lessons; }
    // Adds the staged entries of a head, to which the queries of an echo gave `observed`.
    void add_lessons(std::size_t layer, std::size_t head, const StagedEntries& staged,
                     const float* observed, Workspace& workspace) noexcept;

    // Returns the rotations that turn the stored keys of a layer at the positions [begin, end) back
    // to position 0. The layer's features must be known.
    StoredInverseRope stored_inverse_rope(std::size_t layer, std::int32_t begin, std::int32_t end,
                                          std::int32_t shift) const;

    StoreCommon common;
    PageShare share;
    std::vector<StoreLayer> layers;
    InverseRopes inverse_ropes{};
    std::unique_ptr<ColdStorage> storage;
    std::deque<Workspace> workspaces{};
    int most_loaded = 0;  // most entries of a head in states that are being loaded
};

}  // namespace entropykv
