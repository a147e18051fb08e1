#include "store/store_pool.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "store/checkpoint.hpp"
#include "store/head_store.hpp"
#include "store/lesson_sums.hpp"

namespace entropykv {
namespace {

constexpr int kMostSequences = 256;  // of a llama_context

int checked(int max_tokens) {
    if (max_tokens < 1 || max_tokens > kMostPositions)
        throw std::invalid_argument("max_tokens and max_entries must be from 1 to 2^30");
    return max_tokens;
}

int checked_sequences(int n) {
    if (n < 1 || n > kMostSequences)
        throw std::invalid_argument("a pool has from 1 to 256 sequences");
    return n;
}

}  // namespace

StorePool::StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens,
                     int n_sequences, bool follows_share)
    : pages_(pool_page_bytes(layers, type), 0),
      staging_(layers, page_layouts(layers, type), pages_.page_bytes(), checked(max_tokens),
               checked_sequences(n_sequences)),
      predictor_(layers.size()),
      follows_share_(follows_share) {}

StorePool::StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens)
    : StorePool(layers, type, max_tokens, 1, true) {}

StorePool::StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens,
                     int n_sequences)
    : StorePool(layers, type, max_tokens, n_sequences, false) {}

std::size_t StorePool::prediction_bytes() const {
    return predictor_.bytes() + (lessons ? lessons->bytes() : 0);
}

void StorePool::set_pages(std::size_t pages) {
    if (pages > std::numeric_limits<std::size_t>::max() / pages_.page_bytes())
        throw std::invalid_argument("more pages than memory has addresses");
    if (shared_pages_ > pages)
        throw std::invalid_argument("the shares of the sequences exceed the pool");
    const bool shrinks = pages < pages_.budget_pages();
    while (pages_.used_pages() > pages && drop_checkpoint_ && drop_checkpoint_()) {
    }
    pages_.set_budget(pages);
    if (!shrinks) return;
    pages_.compact([&](auto relocate) {
        for (HeadStore* store : stores_) {
            store->parts().over_heads([&](Head& head) { head.pages.move(relocate); });
        }
        for (Checkpoint* checkpoint : checkpoints_) checkpoint->move_pages(relocate);
    });
}

void StorePool::check_share(std::size_t before, std::size_t pages) const {
    const std::size_t others = shared_pages_ - before;
    const std::size_t all = pages_.budget_pages();
    if (!follows_share_ && pages > all - others)
        throw std::invalid_argument("the other sequences leave fewer pages of the pool");
}

void StorePool::set_share(std::size_t before, std::size_t pages) {
    shared_pages_ += pages - before;
    if (follows_share_) set_pages(pages);
}

void StorePool::leave(HeadStore& store, std::size_t share) {
    shared_pages_ -= share;
    stores_.erase(std::remove(stores_.begin(), stores_.end(), &store), stores_.end());
}

void StorePool::leave(Checkpoint& checkpoint) {
    checkpoints_.erase(std::remove(checkpoints_.begin(), checkpoints_.end(), &checkpoint),
                       checkpoints_.end());
}

}  // namespace entropykv
