// What sequences of one model share: the pages of a hard budget, of which every sequence has a
// share, and the staging area. The shares together are never more than the pool has, and a store
// never has more pages than its share, those that others own, too, included: so each of them can be
// copied at any time, once checkpoints, which have no share, have made room.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "page/page_pool.hpp"
#include "store/predictor_weights.hpp"
#include "store/staging.hpp"

namespace entropykv {

class Checkpoint;
class HeadStore;
class LessonSums;

class StorePool {
public:
    // Of one store, whose share is all of it: the pool's budget follows.
    StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens);
    // Of up to n_sequences that are read at a time; set_pages() gives it a budget.
    StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens, int n_sequences);

    PagePool& pages() { return pages_; }
    const PagePool& pages() const { return pages_; }
    const Staging& staging() const { return staging_; }
    // What predicts the scores of all of its sequences.
    PredictorWeights& predictor() { return predictor_; }
    const PredictorWeights& predictor() const { return predictor_; }
    // What it is fitted to: of one part of a micro-batch at a time, since a step has one echo.
    std::shared_ptr<LessonSums> lessons{};
    bool collects_lessons = false;
    // What the predictor and the lessons take.
    std::size_t prediction_bytes() const;
    std::size_t shared_pages() const { return shared_pages_; }

    // Gives the pool so many pages; what the system gets back of a smaller one is told by
    // mapped_bytes(). Throws std::invalid_argument where the shares are more than that.
    void set_pages(std::size_t pages);

    // drop() makes a checkpoint give its pages back, and returns whether there was one: for stores
    // that need pages, between micro-batches.
    void on_full(std::function<bool()> drop) { drop_checkpoint_ = std::move(drop); }
    // As many free pages as needed() says, which may fall as checkpoints go; whether there are. To
    // take them allocates nothing then. Throws std::bad_alloc where the system has no memory.
    template <typename Needed>
    bool make_room(Needed needed) {
        while (pages_.budget_pages() - pages_.used_pages() < needed())
            if (!drop_checkpoint_ || !drop_checkpoint_()) return false;
        pages_.map(pages_.used_pages() + needed());
        return true;
    }

    // For stores. Throws std::invalid_argument where the other shares do not leave so many pages.
    void check_share(std::size_t before, std::size_t pages) const;
    void set_share(std::size_t before, std::size_t pages);
    void join(HeadStore& store) { stores_.push_back(&store); }
    void leave(HeadStore& store, std::size_t share);
    void join(Checkpoint& checkpoint) { checkpoints_.push_back(&checkpoint); }
    void leave(Checkpoint& checkpoint);

private:
    StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens, int n_sequences,
              bool follows_share);

    PagePool pages_;
    Staging staging_;
    PredictorWeights predictor_;
    bool follows_share_;
    std::size_t shared_pages_ = 0;
    std::vector<HeadStore*> stores_;
    std::vector<Checkpoint*> checkpoints_;
    std::function<bool()> drop_checkpoint_;
};

}  // namespace entropykv
