#include "store/head_store.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "decide/budget.hpp"

namespace entropykv {

namespace {

void check_protection(const Protection& protection) {
    for (const int n : {protection.n_sinks, protection.recent_window})
        if (n < 0 || n > kMostPositions)
            throw std::invalid_argument("sinks or a recent window outside of 0 .. 2^30 entries");
}

void check_importance(const ImportanceSettings& importance) {
    measure_of(importance.kind);  // throws where there is none
    if (importance.observation_window < 1)
        throw std::invalid_argument("observation_window must be 1 or more");
    if (importance.future_positions < 1 || importance.future_positions > kMostPositions)
        throw std::invalid_argument("future_positions outside of 1 .. 2^30");
    if (!(importance.decay >= 0.0f && importance.decay <= 1.0f))
        throw std::invalid_argument("decay must be a number from 0 to 1");
    if (!(importance.variation >= 0.0f && std::isfinite(importance.variation)))
        throw std::invalid_argument("variation must be 0 or a positive number");
}

}  // namespace

int most_entries(const LayerShape& shape, int max_entries) {
    return shape.window > 0 ? std::min(max_entries, shape.window + kWindowSlack) : max_entries;
}

HeadStore::HeadStore(const std::vector<LayerShape>& shapes, const StoreSettings& settings,
                     std::shared_ptr<StorePool> pool)
    : settings_(settings),
      pool_(pool != nullptr
                ? std::move(pool)
                : std::make_shared<StorePool>(shapes, settings.type, settings.max_tokens)) {
    for (const int n : {settings.max_tokens, settings.max_entries})
        if (n < 1 || n > kMostPositions)
            throw std::invalid_argument("max_tokens and max_entries must be from 1 to 2^30");
    check_importance(settings.importance);
    check_protection(settings.protection);
    const std::vector<PageLayout> layouts = page_layouts(shapes, settings.type);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        Layer layer{shapes[i], layouts[i], {}};
        layer.heads.resize(index(shapes[i].n_head_kv));
        if (settings.importance.measure().evidence == Evidence::expectation)
            follow_queries(layer, i);
        layers_.push_back(std::move(layer));
    }
    if (settings_.freezing) start_freezing();
    set_workers(1, kKernelsPortable);
    pool_->join(*this);
}

HeadStore::~HeadStore() {
    for (Layer& layer : layers_)
        for (Head& head : layer.heads) drop_pages(layer, head, 0);
    pool_->leave(*this, share_pages_);
}

void HeadStore::give_up_share() {
    if (used_pages_ > 0) throw std::logic_error("a store that holds pages needs its share");
    pool_->set_share(share_pages_, 0);
    share_pages_ = 0;
}

HeadStore::Slot HeadStore::staged_slot(const Layer& layer, int head, int i) const {
    return {staging_of(layer, head)[layer.layout.page_of(i)], layer.layout.slot_of(i)};
}

void HeadStore::grow_pages(const Layer& layer, Head& head, int entries) {
    const std::size_t wanted = index(pages_for(entries, layer.layout.entries));
    while (head.pages.size() < wanted) {
        std::byte* page = pool_->pages().allocate();
        if (page == nullptr) throw std::logic_error("the budgets of the KV heads exceed the pool");
        head.pages.push_back(page);
        if (head.n_shared > 0) {
            head.shared.push_back(0);
            head.importance.resize(head.pages.size() * index(layer.layout.entries));
        }
        peak_pages_ = std::max(peak_pages_, ++used_pages_);
    }
}

void HeadStore::drop_pages(const Layer& layer, Head& head, int entries) {
    const std::size_t wanted = index(pages_for(entries, layer.layout.entries));
    while (head.pages.size() > wanted) {
        pool_->pages().release(head.pages.back());
        head.pages.pop_back();
        --used_pages_;
        if (head.n_shared == 0) continue;
        head.n_shared -= head.shared.back();
        head.shared.pop_back();
        forget_if_alone(head);
    }
}

void HeadStore::set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                            const Protection& protection) {
    check_protection(protection);
    if (pool_pages > std::numeric_limits<std::size_t>::max() / page_bytes())
        throw std::invalid_argument("more pages than memory has addresses");
    std::size_t wanted_pages = 0;
    std::size_t n_heads = 0;
    for (const Layer& layer : layers_) {
        for (int h = 0; h < layer.shape.n_head_kv; ++h, ++n_heads) {
            if (n_heads >= budgets.size()) throw std::invalid_argument("too few budgets");
            const int budget = budgets[n_heads];
            if (budget > settings_.max_entries || budget < 1)
                throw std::invalid_argument("a budget outside of 1 .. max_entries");
            const std::int64_t least =
                std::min<std::int64_t>(std::int64_t{protection.n_sinks} + protection.recent_window,
                                       most_entries(layer.shape, settings_.max_entries));
            if (!settings_.own_windows && budget < least)
                throw std::invalid_argument("a budget below sinks + recent window");
            wanted_pages += static_cast<std::size_t>(pages_for(budget, layer.layout.entries));
        }
    }
    if (n_heads != budgets.size()) throw std::invalid_argument("too many budgets");
    if (wanted_pages > pool_pages) throw std::invalid_argument("the budgets exceed the pool");
    pool_->check_share(share_pages_, pool_pages);

    std::size_t first = 0;
    for (Layer& layer : layers_)
        for (Head& head : layer.heads)
            if (const int budget = budgets[first++]; head.cold && head.count > budget)
                head.cold->prepare(head.count - budget);
    pool_->make_room([&] { return copies_to_evict(budgets); });
    settings_.protection = protection;
    std::size_t next = 0;
    for (Layer& layer : layers_)
        for (Head& head : layer.heads) head.budget = budgets[next++];
    keep_budgets();
    pool_->set_share(share_pages_, pool_pages);
    share_pages_ = pool_pages;
    size_workspaces();
}

void HeadStore::reserve(int n_tokens, std::int32_t newest, bool recalls, int n_echo) {
    if (n_tokens < 0 || n_echo < 0 || n_tokens + n_echo < 1 ||
        n_tokens > settings_.max_tokens - n_echo)
        throw std::invalid_argument("a micro-batch outside of 1 .. max_tokens");
    newest_ = newest;
    single_query_ = n_tokens + n_echo == 1;
    most_loaded_ = 0;
    for (Layer& layer : layers_) {
        for (Head& head : layer.heads) {
            const int due = prepare_cold(layer, head, n_tokens, newest);
            const int restored = due + (recalls ? most_recalled(head) : 0);
            head.upcoming = std::min(head.budget, head.count + n_tokens + restored);
        }
    }
    pool_->make_room([&] { return pages_to_read(n_tokens); });
    for (Layer& layer : layers_) {
        for (Head& head : layer.heads) {
            if (schedule_) drop_pages(layer, head, head.upcoming);
            if (n_tokens > 0) own_pages(layer, head, first_written(layer, head, n_tokens));
            grow_pages(layer, head, head.upcoming);
            size_homes(layer, head);
        }
    }
}

// How many pages a micro-batch needs, copies of what others own, too, included.
std::size_t HeadStore::pages_to_read(int n_tokens) const {
    std::size_t n = 0;
    for (const Layer& layer : layers_) {
        for (const Head& head : layer.heads) {
            const std::size_t wanted = index(pages_for(head.upcoming, layer.layout.entries));
            n += wanted > head.pages.size() ? wanted - head.pages.size() : 0;
            if (n_tokens > 0)
                n += foreign_pages(head, first_written(layer, head, n_tokens), head.pages.size());
        }
    }
    return n;
}

// How many copies evicting to smaller budgets can need, at most.
std::size_t HeadStore::copies_to_evict(const std::vector<int>& budgets) const {
    std::size_t n = 0;
    std::size_t next = 0;
    for (const Layer& layer : layers_) {
        for (const Head& head : layer.heads) {
            const int budget = budgets[next++];
            if (head.count > budget)
                n += foreign_pages(head, 0, index(pages_for(budget, layer.layout.entries)));
        }
    }
    return n;
}

void HeadStore::apply(const Layer& layer, Head& head, int head_index, int n_staged,
                      const std::uint8_t* kept) noexcept {
    EntryCopies copies(layer.layout, *kernels_);
    const auto copy = [&](const Slot& from, const Slot& to) {
        copies.add(from.page, from.index, to.page, to.index);
        copy_marks(layer.layout, from.page, from.index, to.page, to.index);
    };
    // Between micro-batches, pages that others own, too, are copied where they are written to.
    const auto writable_slot = [&](int i) {
        own_page(layer, head, layer.layout.page_of(i));
        return stored_slot(layer, head, i);
    };
    // Holes among the stored entries take the staged survivors first.
    int hole = 0;
    const auto next_hole = [&] {
        while (hole < head.count && kept[hole] != 0) ++hole;
        return hole;
    };
    int end = head.count;
    for (int i = 0; i < n_staged; ++i) {
        if (kept[head.count + i] == 0) continue;
        const int target = next_hole() < head.count ? hole++ : end++;
        copy(staged_slot(layer, head_index, i), writable_slot(target));
        begin_entry(head, target);
    }
    // Holes that are left take the last survivors. Where staged entries were appended, none is.
    if (end == head.count) {
        while (true) {
            while (end > hole && kept[end - 1] == 0) --end;
            if (next_hole() >= end) break;
            --end;
            const Slot to = writable_slot(hole);
            const float importance = stored_importance(layer, head, end);
            copy(stored_slot(layer, head, end), to);
            layer.layout.importance(to.page)[to.index] = importance;
            move_entry(head, end, hole++);
        }
    }
    head.count = end;
}

// All staged entries after the stored ones, whole pages where they begin with one.
void HeadStore::append(const Layer& layer, Head& head, int head_index, int n_staged) noexcept {
    const int per_page = layer.layout.entries;
    int i = 0;
    if (head.count % per_page == 0)
        for (; i + per_page <= n_staged; i += per_page)
            std::memcpy(stored_slot(layer, head, head.count + i).page,
                        staged_slot(layer, head_index, i).page, layer.layout.bytes);
    EntryCopies copies(layer.layout, *kernels_);
    for (; i < n_staged; ++i) {
        const Slot from = staged_slot(layer, head_index, i);
        const Slot to = stored_slot(layer, head, head.count + i);
        copies.add(from.page, from.index, to.page, to.index);
        copy_marks(layer.layout, from.page, from.index, to.page, to.index);
    }
    for (i = 0; i < n_staged; ++i) begin_entry(head, head.count + i);
    head.count += n_staged;
}

void HeadStore::keep_best(const Layer& layer, Head& head, int head_index, int n_staged, int keep,
                          Workspace& workspace) noexcept {
    keep_scored(layer, head, head_index, n_staged, keep,
                score(layer, head, head_index, n_staged, keep, workspace), workspace);
}

void HeadStore::keep_scored(const Layer& layer, Head& head, int head_index, int n_staged, int keep,
                            std::int32_t newest, Workspace& workspace) noexcept {
    const int total = head.count + n_staged;
    const auto select = [&](const Protection& protection) {
        return select_survivors(workspace.scores.data(), workspace.positions.data(), total, keep,
                                protection, newest, workspace.kept.data(),
                                workspace.scratch.data());
    };
    const Protection protection = protection_of(layer, head, newest);
    int n_kept = select(protection);
    // The pool's bytes come first.
    if (n_kept > head.budget) n_kept = select({0, 0, protection.oldest});
    if (head.cold) {
        freeze_victims(layer, head, head_index, total, newest, workspace.kept.data());
    } else {
        int n_left = 0;
        for (int i = 0; i < total; ++i) {
            if (!protection.has_left(workspace.positions[index(i)])) continue;
            note_left(layer, workspace.positions[index(i)]);
            ++n_left;
        }
        evicted_.fetch_add(index(total - n_kept - n_left), std::memory_order_relaxed);
    }
    apply(layer, head, head_index, n_staged, workspace.kept.data());
}

void HeadStore::commit(int layer_index, int head_index, int n_staged, const float* observed,
                       float output_squares, int workspace_index) noexcept {
    const Layer& layer = layers_[index(layer_index)];
    Head& head = layers_[index(layer_index)].heads[index(head_index)];
    Workspace& workspace = workspaces_[index(workspace_index)];
    if (observed != nullptr) add_observed(layer, head, head_index, n_staged, observed);
    const bool scheduled = schedule_ && head.cold && observed != nullptr;
    if (scheduled) follow_schedule(layer, head, head_index, n_staged, observed, newest_, workspace);
    take_in(layer, head, head_index, n_staged, newest_, output_squares, workspace);
    if (scheduled) restore_due(layer, head, newest_, workspace);
}

// Staged entries, and what the budget holds of them and the stored ones.
void HeadStore::take_in(const Layer& layer, Head& head, int head_index, int n_staged,
                        std::int32_t newest, float output_squares, Workspace& workspace) noexcept {
    const int total = head.count + n_staged;
    const bool evicts = total > head.budget;
    const bool measured = measures();
    if (!evicts && !measured) {
        append(layer, head, head_index, n_staged);
        return;
    }
    const auto start = std::chrono::steady_clock::now();
    const int keep = entries_to_keep(head.budget, n_staged, protection_of(layer, head, newest));
    if (measured) {
        score(layer, head, head_index, n_staged, keep, workspace);
        measure(layer, head, total, newest, output_squares, workspace);
    }
    if (!evicts) {
        append(layer, head, head_index, n_staged);
        return;
    }
    if (leave_window(layer, head, head_index, n_staged, newest, workspace)) return;
    if (!measured) score(layer, head, head_index, n_staged, keep, workspace);
    keep_scored(layer, head, head_index, n_staged, keep, newest, workspace);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    eviction_nanoseconds_.fetch_add(
        std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
        std::memory_order_relaxed);
}

void HeadStore::note_left(const Layer& layer, std::int32_t position) noexcept {
    const std::int32_t from = layer.shape.first_blind(position);
    std::int32_t known = whole_from_.load(std::memory_order_relaxed);
    while (known < from &&
           !whole_from_.compare_exchange_weak(known, from, std::memory_order_relaxed)) {
    }
}

// Drops what no query after `newest` sees, if the others then fit the budget; whether they do.
// Where there is room, what the last queries saw stays. (Where windows are chunked, a part of the
// one before would be of no use.)
bool HeadStore::leave_window(const Layer& layer, Head& head, int head_index, int n_staged,
                             std::int32_t newest, Workspace& workspace) noexcept {
    const std::int32_t oldest = layer.shape.oldest_seen(newest + 1);
    if (oldest <= 0) return false;
    const int margin = layer.shape.chunked ? 0 : kWindowMargin;
    return keep_from(layer, head, head_index, n_staged, oldest - margin, workspace) ||
           keep_from(layer, head, head_index, n_staged, oldest, workspace);
}

// Drops what is older, if the others fit the budget; whether they do.
bool HeadStore::keep_from(const Layer& layer, Head& head, int head_index, int n_staged,
                          std::int32_t oldest, Workspace& workspace) noexcept {
    int n_kept = 0;
    std::int32_t left = -1;
    over_pages(layer, head, head_index, n_staged, [&](std::byte* page, int n, int first) {
        const std::int32_t* positions = layer.layout.positions(page);
        for (int i = 0; i < n; ++i) {
            const bool stays = positions[i] >= oldest;
            workspace.kept[index(first + i)] = stays ? 1 : 0;
            n_kept += stays ? 1 : 0;
            if (!stays) left = std::max(left, positions[i]);
        }
    });
    if (n_kept > head.budget) return false;
    if (left >= 0) note_left(layer, left);
    apply(layer, head, head_index, n_staged, workspace.kept.data());
    return true;
}

// Marks the stored entries before a position as kept.
void HeadStore::mark_before(const Layer& layer, const Head& head, std::int32_t position,
                            Workspace& workspace) const noexcept {
    for (int i = 0; i < head.count; ++i) {
        const Slot slot = stored_slot(layer, head, i);
        const bool stays = layer.layout.positions(slot.page)[slot.index] < position;
        workspace.kept[index(i)] = stays ? 1 : 0;
    }
}

// How many pages that others own, too, apply() would write to.
std::size_t HeadStore::foreign_holes(const Layer& layer, const Head& head,
                                     const std::uint8_t* kept) const noexcept {
    const auto n_kept = static_cast<int>(std::count(kept, kept + head.count, std::uint8_t{1}));
    std::size_t n = 0;
    for (int first = 0; first < n_kept; first += layer.layout.entries) {
        const int last = std::min(n_kept, first + layer.layout.entries);
        if (std::find(kept + first, kept + last, std::uint8_t{0}) == kept + last) continue;
        const std::size_t page = index(layer.layout.page_of(first));
        n += foreign_pages(head, page, page + 1);
    }
    return n;
}

std::size_t HeadStore::copies_to_truncate(std::int32_t position) {
    Workspace& workspace = workspaces_[0];
    std::size_t n = 0;
    for (const Layer& layer : layers_) {
        for (const Head& head : layer.heads) {
            if (head.n_shared == 0) continue;
            mark_before(layer, head, position, workspace);
            n += foreign_holes(layer, head, workspace.kept.data());
        }
    }
    return n;
}

void HeadStore::truncate(std::int32_t position) {
    if (position < 0) throw std::invalid_argument("positions begin at 0");
    Workspace& workspace = workspaces_[0];
    whole_from_.store(std::min(windows_whole_from(), position), std::memory_order_relaxed);
    pool_->make_room([&] { return copies_to_truncate(position); });
    for (Layer& layer : layers_) {
        for (int h = 0; h < layer.shape.n_head_kv; ++h) {
            Head& head = layer.heads[index(h)];
            mark_before(layer, head, position, workspace);
            apply(layer, head, h, 0, workspace.kept.data());
            drop_pages(layer, head, head.count);
            if (head.cold) head.cold->truncate(position);
            if (position == 0) head.queries.reset();
        }
    }
}

std::vector<std::int32_t> HeadStore::positions(int layer_index, int head_index) const {
    const Layer& layer = layers_.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    std::vector<std::int32_t> result;
    for (int i = 0; i < head.count; ++i) {
        const Slot slot = stored_slot(layer, head, i);
        result.push_back(layer.layout.positions(slot.page)[slot.index]);
    }
    std::sort(result.begin(), result.end());
    return result;
}

std::vector<float> HeadStore::importance(int layer_index, int head_index) const {
    const Layer& layer = layers_.at(index(layer_index));
    const Head& head = layer.heads.at(index(head_index));
    std::vector<std::pair<std::int32_t, float>> entries;
    for (int i = 0; i < head.count; ++i) {
        const Slot slot = stored_slot(layer, head, i);
        entries.emplace_back(layer.layout.positions(slot.page)[slot.index],
                             stored_importance(layer, head, i));
    }
    std::sort(entries.begin(), entries.end());
    std::vector<float> result;
    for (const auto& entry : entries) result.push_back(entry.second);
    return result;
}

std::size_t HeadStore::entries() const {
    return total([](const Head& head) { return index(head.count); });
}

}  // namespace entropykv
