#include "store/store_pool.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "decide/budget.hpp"
#include "store/checkpoint.hpp"
#include "store/head_store.hpp"
#include "store/lesson_sums.hpp"

namespace entropykv {
namespace {

constexpr int kMostDrafts = 63;
constexpr int kMostSequences = 256;  // llama.cpp's limit for a llama_context

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

int checked_drafts(int n) {
    if (n < 0 || n > kMostDrafts)
        throw std::invalid_argument("a sequence reads from 0 to 63 drafts at a time");
    return n;
}

}  // namespace

std::size_t Staging::pages_of(int n_tokens) const {
    return static_cast<std::size_t>(pages_for(n_tokens, least_entries_));
}

// The layer that is being attended to and the next one take turns with two sets of rows, and every
// layer with several readers has its own. The two sets have separate first pages, because single
// tokens of two layers are staged at a time, and share the other pages.
Staging::Staging(const std::vector<LayerShape>& layers, const std::vector<PageLayout>& layouts,
                 std::size_t page_bytes, int max_tokens, int n_sequences, int n_drafts,
                 bool all_layers)
    : least_entries_(layouts.front().entries),
      n_drafts_(n_drafts),
      single_pages_(static_cast<std::size_t>(n_sequences)) {
    for (const PageLayout& layout : layouts)
        least_entries_ = std::min(least_entries_, layout.entries);
    // Every token of a run with drafts has a page of its own.
    row_pages_ = pages_of(max_tokens) + single_pages_ - 1 +
                 single_pages_ * static_cast<std::size_t>(n_drafts);
    const auto has_own = [&](const LayerShape& shape) { return all_layers || shape.readers > 1; };
    std::size_t most_heads = 0;
    for (const LayerShape& shape : layers)
        if (!has_own(shape))
            most_heads = std::max(most_heads, static_cast<std::size_t>(shape.n_head_kv));
    std::size_t n_rows = 2 * most_heads;
    for (std::size_t i = 0; i < layers.size(); ++i) {
        first_row_.push_back(has_own(layers[i]) ? n_rows : i % 2 * most_heads);
        if (has_own(layers[i])) n_rows += static_cast<std::size_t>(layers[i].n_head_kv);
    }
    const std::size_t n_shared = most_heads * (row_pages_ - single_pages_);
    memory_ = AlignedBytes((n_rows * row_pages_ - n_shared) * page_bytes);
    std::byte* next = memory_.data();
    for (std::size_t row = 0; row < n_rows; ++row) {
        for (std::size_t page = 0; page < row_pages_; ++page) {
            const bool shared = row >= most_heads && row < 2 * most_heads && page >= single_pages_;
            pages_.push_back(shared ? pages_[(row - most_heads) * row_pages_ + page] : next);
            if (!shared) next += page_bytes;
        }
    }
}

StorePool::StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens,
                     int n_sequences, int n_drafts, bool is_private, bool stages_all_layers)
    : pages_(pool_page_bytes(layers, type), 0),
      staging_(layers, page_layouts(layers, type), pages_.page_bytes(), checked(max_tokens),
               checked_sequences(n_sequences), checked_drafts(n_drafts), stages_all_layers),
      predictor_(layers.size()),
      is_private_(is_private) {}

StorePool::StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens,
                     bool stages_all_layers)
    : StorePool(layers, type, max_tokens, 1, 0, true, stages_all_layers) {}

StorePool::StorePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens,
                     int n_sequences, int n_drafts)
    : StorePool(layers, type, max_tokens, n_sequences, n_drafts, false, false) {}

std::size_t StorePool::prediction_bytes() const {
    return predictor_.bytes() + (lessons ? lessons->bytes() : 0);
}

void StorePool::set_pages(std::size_t pages) {
    if (pages > std::numeric_limits<std::size_t>::max() / pages_.page_bytes())
        throw std::invalid_argument("more pages than memory has addresses");
    if (shared_pages_ > pages)
        throw std::invalid_argument("the shares of the sequences exceed the pool");
    const bool shrinks = pages < pages_.budget_pages();
    while (pages_.used_pages() > pages && free_pages_ && free_pages_()) {
    }
    pages_.set_budget(pages);
    if (shrinks) compact();
}

void StorePool::compact() {
    pages_.compact([&](auto relocate) {
        for (HeadStore* store : stores_) {
            store->components().for_each_head([&](Head& head) { head.pages.move(relocate); });
        }
        for (Checkpoint* checkpoint : checkpoints_) checkpoint->move_pages(relocate);
    });
}

std::byte* StorePool::adopt(const std::shared_ptr<MappedFile>& file, std::size_t pages,
                            const std::vector<std::size_t>& unused) {
    std::byte* first = pages_.adopt(file, pages, unused);
    if (first != nullptr || pages - unused.size() > pages_.budget_pages() - pages_.used_pages())
        return first;
    compact();
    return pages_.adopt(file, pages, unused);
}

void StorePool::check_share(std::size_t before, std::size_t pages) const {
    const std::size_t others = shared_pages_ - before;
    const std::size_t all = pages_.budget_pages();
    if (!is_private_ && pages > all - others)
        throw std::invalid_argument("the other sequences leave fewer pages of the pool");
}

void StorePool::set_share(std::size_t before, std::size_t pages) {
    shared_pages_ += pages - before;
    if (is_private_) set_pages(pages);
}

void StorePool::leave(HeadStore& store, std::size_t share) {
    shared_pages_ -= share;
    stores_.erase(std::remove(stores_.begin(), stores_.end(), &store), stores_.end());
}

void StorePool::leave(Checkpoint& checkpoint) {
    checkpoints_.erase(std::remove(checkpoints_.begin(), checkpoints_.end(), &checkpoint),
                       checkpoints_.end());
}

std::byte* PageShare::allocate() {
    std::byte* page = pool_->pages().allocate();
    if (page == nullptr) throw std::logic_error("the budgets of the KV heads exceed the pool");
    return page;
}

std::byte* PageShare::take() {
    std::byte* page = allocate();
    peak_ = std::max(peak_, ++used_);
    return page;
}

void PageShare::release(std::byte* page) {
    pool_->pages().release(page);
    --used_;
}

std::byte* PageShare::adopt(const std::shared_ptr<MappedFile>& file, std::size_t pages,
                            const std::vector<std::size_t>& unused) {
    std::byte* first = pool_->adopt(file, pages, unused);
    if (first == nullptr) return nullptr;
    used_ += pages - unused.size();
    note_peak();
    return first;
}

void PageShare::note_peak() { peak_ = std::max(peak_, used_); }

std::byte* PageShare::own(std::byte* page, std::size_t bytes) {
    if (!is_shared_page(page)) return page;
    std::byte* copy = allocate();
    std::memcpy(copy, page, bytes);
    pool_->pages().release(page);
    return copy;
}

void PageShare::set(std::size_t pages) {
    pool_->set_share(budget_, pages);
    budget_ = pages;
}

}  // namespace entropykv
