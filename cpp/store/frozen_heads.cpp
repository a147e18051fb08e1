#include "store/frozen_heads.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "platform/scratch.hpp"

namespace entropykv {
namespace {

void check_schedule(const FreezeSchedule& schedule) {
    if (schedule.window < 0 || schedule.window > kMostPositions || schedule.history < 0 ||
        !(schedule.rate > 0.0f) || !(schedule.threshold >= 0.0f))
        throw std::invalid_argument("a schedule of freezing with impossible numbers");
}

// Returns how many pages of storage each of n heads may fill, besides its open page; 0 means no
// limit.
std::size_t most_pages(std::size_t limit_bytes, std::size_t n_heads, std::size_t page_bytes,
                       std::size_t open_bytes) {
    if (limit_bytes == 0) return 0;
    const std::size_t of_head = limit_bytes / n_heads;
    const std::size_t least = open_bytes + page_bytes;
    if (of_head < least)
        throw std::invalid_argument("cold storage must hold 2 pages of every KV head, " +
                                    std::to_string(n_heads * least) + " bytes");
    return (of_head - open_bytes) / page_bytes;
}

// Selects what restore() asks for; with a protection, only entries that it covers.
struct MatchesRequest {
    const RestoreRequest& asked;
    const Protection* protection;
    std::int32_t now;
    bool of_page(const ColdHead&, int) const { return true; }
    bool of_record(const ColdHead& cold, int page, int slot) const {
        const ColdRecord record = cold.record(page * cold.per_page() + slot);
        return record.frozen() && record.frozen_at > asked.frozen_after &&
               record.due > asked.due_after &&
               (protection == nullptr || protection->covers(record.position, now));
    }
};

}  // namespace

void FrozenHeads::start() {
    const StoreSettings& settings = components_.common.settings;
    const FreezeSettings& freezing = *settings.freezing;
    if (settings.own_windows)
        throw std::invalid_argument("heads that keep the same positions cannot be frozen");
    if (freezing.schedule) check_schedule(*freezing.schedule);
    std::size_t page_bytes = 0;  // bytes of a page of cold storage
    std::size_t n_heads = 0;
    for (StoreLayer& layer : components_.layers) {
        // Layers with a window freeze nothing, since no query attends to what has left it.
        if (layer.shape.window > 0) continue;
        layer.cold = std::make_unique<ColdLayout>(freezing.type, layer.layout);
        page_bytes = std::max(page_bytes, layer.cold->codec.bytes());
        n_heads += layer.heads.size();
    }
    if (n_heads == 0) throw std::invalid_argument("every layer has a window: nothing to freeze");
    if (freezing.descriptor >= 0) {
        components_.storage =
            std::make_unique<FileStorage>(page_bytes, freezing.descriptor, freezing.nonce);
    } else {
        components_.storage = std::make_unique<MemoryStorage>(page_bytes);
    }
    components_.common.schedule = freezing.schedule;
    const std::size_t most =
        most_pages(freezing.limit_bytes, n_heads, page_bytes, components_.share.page_bytes());
    for (StoreLayer& layer : components_.layers) {
        for (Head& head : layer.heads) {
            if (!layer.cold) continue;
            head.frozen.cold.emplace(*layer.cold, *components_.storage, most,
                                     freezing.schedule.has_value());
            head.frozen.counts_detections = freezing.schedule.has_value();
        }
    }
}

int FrozenHeads::prepare(Head& head, int n_tokens) {
    if (!head.frozen) return 0;
    ColdHead& cold = *head.frozen.cold;
    const bool scheduled = components_.common.schedule.has_value();
    const int held = head.count() + n_tokens;
    const int recalled = Recall::most(head);
    const int due = scheduled ? cold.count_due(components_.common.newest) : 0;
    // Without a schedule, evicted entries get a record, and so do those that give their place to
    // recalled ones. Under a schedule, any entry may get one. An entry that was restored has a
    // record already, unless a limit dropped it.
    const int evicted = std::max(0, held - head.budget() + most_decode_room(head.budget()));
    const int asked = scheduled ? held + recalled + due : evicted + recalled;
    const int n_new = cold.is_limited() ? asked : std::min(asked, held);
    cold.prepare(n_new);
    const std::size_t n_records =
        PageLayout::index(cold.n_pages()) * PageLayout::index(head.layout().entries);
    if (components_.common.settings.freezing->recall_interval > 0)
        for (Workspace& workspace : components_.workspaces)
            workspace.recall.size_for_records(n_records);
    return due;
}

void FrozenHeads::freeze_all(std::int32_t now) {
    std::uint8_t* mask = components_.workspaces.front().evictor.mask();
    const Freezer freezer(components_.common);
    components_.for_each_head([](Head& head) {
        if (head.frozen) head.frozen.cold->prepare(head.count());
    });
    components_.for_each_head([&](Head& head) {
        if (!head.frozen) return;
        std::fill_n(mask, head.count(), std::uint8_t{0});
        freezer.freeze_unmarked(head, {}, now, mask);
        head.keep(mask, {}, *components_.common.kernels);
        head.pages.drop(0);
    });
}

std::size_t FrozenHeads::restore(const RestoreRequest& asked, std::int32_t now, bool forget) {
    std::size_t n = 0;
    components_.for_each_head([&](Head& head) {
        if (!head.frozen) return;
        if (forget) {
            head.frozen.cold->clear_detections();
            std::fill(head.frozen.detections.begin(), head.frozen.detections.end(), Detections{});
        }
        n += restore(head, asked, now);
    });
    return n;
}

std::size_t FrozenHeads::restore(Head& head, const RestoreRequest& asked, std::int32_t now) {
    head.pages.grow(std::min(head.budget(), head.count() + head.frozen.n_now()));
    head.size_frozen();
    const Freezer freezer(components_.common);
    std::byte* buffer = components_.workspaces.front().page_read.data();
    // Sinks and the recent window are restored first, since no head may lack them.
    const Protection protection = components_.common.protection_of(head, now);
    int n = freezer.append(head, now, buffer, MatchesRequest{asked, &protection, now});
    n += freezer.append(head, now, buffer, MatchesRequest{asked, nullptr, now});
    head.drop_empty_pages();
    return PageLayout::index(n);
}

void FrozenHeads::stop() {
    std::size_t lost = 0;
    components_.for_each_head([&](Head& head) {
        lost += PageLayout::index(head.frozen.n_now());
        head.frozen.cold.reset();
    });
    components_.common.evicted.fetch_add(lost, std::memory_order_relaxed);
    components_.common.schedule.reset();
}

std::size_t FrozenFigures::now() const {
    return components_.sum_over_heads(
        [](const Head& head) { return PageLayout::index(head.frozen.n_now()); });
}

std::size_t FrozenFigures::bytes() const {
    return components_.sum_over_heads([&](const Head& head) {
        if (!head.frozen) return std::size_t{0};
        const ColdHead& cold = *head.frozen.cold;
        return cold.stored_pages() * components_.storage->page_bytes() +
               (cold.open_page() != ColdHead::kNone ? head.layout().bytes : 0);
    });
}

std::size_t FrozenFigures::sketch_bytes() const {
    return components_.sum_over_heads(
        [](const Head& head) { return head.frozen ? head.frozen.cold->sketch_bytes() : 0; });
}

std::size_t FrozenFigures::overhead_bytes() const {
    if (!components_.storage) return 0;
    std::size_t stored = 0;
    const std::size_t of_heads = components_.sum_over_heads([&](const Head& head) {
        const FrozenEntries& frozen = head.frozen;
        if (!frozen) return std::size_t{0};
        stored += frozen.cold->stored_pages() * components_.storage->page_bytes();
        return frozen.cold->overhead_bytes() + heap_bytes(frozen.record_numbers) +
               heap_bytes(frozen.detections);
    });
    // Counts pages of storage that hold no entry. A file's pages are not in memory at all.
    const std::size_t memory = components_.storage->memory_bytes();
    return of_heads +
           (components_.storage->in_place() ? memory - std::min(memory, stored) : memory);
}

std::vector<std::int32_t> frozen_positions(const Head& head) {
    std::vector<std::int32_t> result;
    head.frozen.for_each_frozen([&](std::int32_t position) { result.push_back(position); });
    std::sort(result.begin(), result.end());
    return result;
}

}  // namespace entropykv
