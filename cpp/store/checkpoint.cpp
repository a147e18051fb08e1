#include "store/checkpoint.hpp"

namespace entropykv {

Checkpoint::Checkpoint(std::shared_ptr<StorePool> pool) : pool_(std::move(pool)) {
    pool_->join(*this);
}

Checkpoint::~Checkpoint() {
    drop();
    pool_->leave(*this);
}

void Checkpoint::drop() {
    for (const CheckpointHead& head : heads_)
        for (std::byte* page : head.pages) pool_->pages().release(page);
    heads_.clear();
}

void Checkpoint::take(std::vector<CheckpointHead> heads, std::size_t evicted,
                      std::int32_t whole_from) {
    heads_ = std::move(heads);
    evicted_ = evicted;
    whole_from_ = whole_from;
    for (const CheckpointHead& head : heads_)
        for (const std::byte* page : head.pages) pool_->pages().share(page);
}

std::unique_ptr<Checkpoint> Checkpoint::copy() const {
    auto other = std::make_unique<Checkpoint>(pool_);
    other->take(heads_, evicted_, whole_from_);
    return other;
}

std::size_t Checkpoint::pages() const {
    std::size_t n = 0;
    for (const CheckpointHead& head : heads_) n += head.pages.size();
    return n;
}

std::size_t Checkpoint::own_pages() const {
    std::size_t n = 0;
    for (const CheckpointHead& head : heads_)
        for (const std::byte* page : head.pages) n += pool_->pages().is_shared(page) ? 0 : 1;
    return n;
}

bool Checkpoint::is_lost() const {
    PagePool& pool = pool_->pages();
    if (!pool.any_file_changed()) return false;
    for (const CheckpointHead& head : heads_)
        for (const std::byte* page : head.pages)
            if (pool.is_changed(page)) return true;
    return false;
}

std::size_t Checkpoint::copied_bytes() const {
    std::size_t bytes = 0;
    for (const CheckpointHead& head : heads_)
        bytes +=
            head.importance.size() * sizeof(float) + (head.dropped ? sizeof(DroppedScores) : 0);
    return bytes;
}

std::size_t Checkpoint::entries() const {
    std::size_t n = 0;
    for (const CheckpointHead& head : heads_) n += static_cast<std::size_t>(head.count);
    return n;
}

}  // namespace entropykv
