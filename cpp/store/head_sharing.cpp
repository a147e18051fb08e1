// Pages that several sequences hold: a checkpoint shares those of a store, and a store that goes on
// from one shares them with it. None of the owners writes to such a page: who has to, gets a copy
// before (outside of the attention op), and what every micro-batch changes of it, the importance of
// its entries, every store has for itself.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "decide/budget.hpp"
#include "store/head_store.hpp"

namespace entropykv {

// Marks all pages of a head as shared.
void HeadStore::share_pages(const Layer& layer, Head& head) {
    const std::size_t per_page = index(layer.layout.entries);
    head.importance.resize(head.pages.size() * per_page);
    head.shared.resize(head.pages.size(), 0);
    for (std::size_t page = 0; page < head.pages.size(); ++page) {
        if (head.shared[page] != 0) continue;
        const float* importance = layer.layout.importance(head.pages[page]);
        std::copy(importance, importance + per_page, head.importance.data() + page * per_page);
        head.shared[page] = 1;
        ++head.n_shared;
    }
}

// Makes a page the head's own: a copy, unless the others have left it.
void HeadStore::own_page(const Layer& layer, Head& head, int number) {
    if (head.n_shared == 0 || head.shared[index(number)] == 0) return;
    std::byte*& page = head.pages[index(number)];
    PagePool& pool = pool_->pages();
    if (pool.is_shared(page)) {
        std::byte* own = pool.allocate();
        if (own == nullptr) throw std::logic_error("the budgets of the KV heads exceed the pool");
        std::memcpy(own, page, layer.layout.bytes);
        pool.release(page);
        page = own;
    }
    const std::size_t per_page = index(layer.layout.entries);
    const float* importance = head.importance.data() + index(number) * per_page;
    std::copy(importance, importance + per_page, layer.layout.importance(page));
    head.shared[index(number)] = 0;
    --head.n_shared;
    forget_if_alone(head);
}

void HeadStore::forget_if_alone(Head& head) noexcept {
    if (head.n_shared > 0) return;
    std::vector<std::uint8_t>().swap(head.shared);
    std::vector<float>().swap(head.importance);
}

// How many of a head's pages [first, last) would have to be copied.
std::size_t HeadStore::foreign_pages(const Head& head, std::size_t first, std::size_t last) const {
    std::size_t n = 0;
    last = std::min(last, head.pages.size());
    for (std::size_t page = first; head.n_shared > 0 && page < last; ++page)
        n += head.shared[page] != 0 && pool_->pages().is_shared(head.pages[page]) ? 1 : 0;
    return n;
}

// The first page that a micro-batch may write to: where something is evicted, any of them; else the
// one that the next entry goes to.
std::size_t HeadStore::first_written(const Layer& layer, const Head& head, int n_tokens) {
    if (head.count + n_tokens > head.budget) return 0;
    return index(layer.layout.page_of(head.count));
}

// All pages from one on.
void HeadStore::own_pages(const Layer& layer, Head& head, std::size_t first) {
    for (std::size_t page = first; head.n_shared > 0 && page < head.pages.size(); ++page)
        own_page(layer, head, static_cast<int>(page));
}

void HeadStore::own_all() {
    pool_->make_room([&] {
        return total([&](const Head& head) { return foreign_pages(head, 0, head.pages.size()); });
    });
    for (Layer& layer : layers_)
        for (Head& head : layer.heads) own_pages(layer, head, 0);
}

std::unique_ptr<Checkpoint> HeadStore::checkpoint() {
    if (freezes()) throw std::logic_error("frozen entries cannot be shared");
    auto made = std::make_unique<Checkpoint>(pool_);
    made->heads_.reserve(total([](const Head&) { return std::size_t{1}; }));
    made->evicted_ = evicted();
    made->whole_from_ = windows_whole_from();
    for (Layer& layer : layers_) {
        for (Head& head : layer.heads) {
            share_pages(layer, head);
            made->heads_.push_back({head.pages, head.count, head.importance, head.queries});
            for (std::byte* page : head.pages) pool_->pages().share(page);
        }
    }
    return made;
}

// A head as a checkpoint has it.
HeadStore::Head HeadStore::head_of(const Checkpoint::Head& from) {
    Head head;
    head.pages = from.pages;
    head.count = from.count;
    head.queries = from.queries;
    head.shared.assign(from.pages.size(), 1);
    head.n_shared = static_cast<int>(from.pages.size());
    head.importance = from.importance;
    forget_if_alone(head);
    return head;
}

const Checkpoint::Head& HeadStore::checked_head(const Checkpoint& from, std::size_t number) const {
    const std::size_t n_heads = total([](const Head&) { return std::size_t{1}; });
    if (from.pool_ != pool_ || from.heads_.size() != n_heads)
        throw std::invalid_argument("a checkpoint of another pool, or one that was dropped");
    return from.heads_.at(number);
}

std::size_t HeadStore::number_of(int layer, int head) const {
    std::size_t number = index(head);
    for (int l = 0; l < layer; ++l) number += layers_[index(l)].heads.size();
    return number;
}

// Room to evict from the heads of a checkpoint; whether there is enough. Where it ends, what nobody
// else owns needs no copy.
bool HeadStore::make_room_for(const Checkpoint& from, bool ends) {
    return pool_->make_room([&] {
        std::size_t needed = 0;
        std::size_t number = 0;
        for (const Layer& layer : layers_) {
            for (const Head& head : layer.heads) {
                const Checkpoint::Head& other = from.heads_[number++];
                if (other.count <= head.budget) continue;
                const std::size_t n = index(pages_for(head.budget, layer.layout.entries));
                for (std::size_t page = 0; page < n; ++page)
                    needed += !ends || pool_->pages().is_shared(other.pages[page]) ? 1 : 0;
            }
        }
        return needed;
    });
}

bool HeadStore::go_on_from(Checkpoint& from, bool ends) {
    checked_head(from, 0);
    if (freezes()) throw std::logic_error("frozen entries cannot be shared");
    for (const Checkpoint::Head& head : from.heads_)
        most_loaded_ = std::max(most_loaded_, head.count);
    size_workspaces();
    truncate(0);
    if (!make_room_for(from, ends)) return false;
    std::size_t number = 0;
    for (Layer& layer : layers_) {
        for (Head& head : layer.heads) {
            Head taken = head_of(from.heads_[number++]);
            taken.budget = head.budget;
            taken.losses = std::move(head.losses);
            head = std::move(taken);
            used_pages_ += head.pages.size();
            if (ends) continue;
            for (const std::byte* page : head.pages) pool_->pages().share(page);
        }
    }
    evicted_.store(from.evicted_, std::memory_order_relaxed);
    whole_from_.store(from.whole_from_, std::memory_order_relaxed);
    if (ends) from.heads_.clear();
    keep_budgets();
    return true;
}

// Evicts from heads that hold more than their budgets.
void HeadStore::keep_budgets() {
    for (Layer& layer : layers_) {
        for (int h = 0; h < layer.shape.n_head_kv; ++h) {
            Head& head = layer.heads[index(h)];
            if (head.count > head.budget) keep_best(layer, head, h, 0, head.budget, workspaces_[0]);
            drop_pages(layer, head, head.count);
        }
    }
    peak_pages_ = std::max(peak_pages_, used_pages_);
}

}  // namespace entropykv
