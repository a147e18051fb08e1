// What a store is made of: HeadStore owns it, and what forks, freezes, saves and loads its heads
// works on it.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "store/keeper.hpp"
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

    StoreCommon common;
    PageShare share;
    std::vector<StoreLayer> layers;
    QueryFollower queries;
    std::unique_ptr<ColdStorage> storage;
    std::deque<Workspace> workspaces{};
    int most_loaded = 0;  // entries of a head in the states that are being loaded
};

}  // namespace entropykv
