#include "store/undo_log.hpp"

#include "decide/budget.hpp"
#include "platform/scratch.hpp"
#include "store/head.hpp"

namespace entropykv {

void UndoLog::reserve(const Head& head, int n_drafts, int n_observed, int n_evicted, int most) {
    clear();
    const PageLayout& layout = head.layout();
    snapshot_size_ = index(most);
    grow(tokens_, index(n_drafts));
    grow(saved_, index(n_evicted));
    grow(moves_, index(n_evicted));
    grow(importance_, index(n_observed) * snapshot_size_);
    const std::size_t n_bytes = index(pages_for(n_evicted, layout.entries)) * layout.bytes;
    if (pages_.size() < n_bytes) pages_ = AlignedBytes(n_bytes);
}

std::size_t UndoLog::bytes() const {
    return bytes_of(tokens_) + bytes_of(saved_) + bytes_of(moves_) + bytes_of(importance_) +
           pages_.size();
}

std::byte* UndoLog::page(const Head& head, int saved) noexcept {
    const PageLayout& layout = head.layout();
    return pages_.data() + index(layout.page_of(saved)) * layout.bytes;
}

std::size_t UndoLog::evicted_after(int n_kept) const noexcept {
    std::size_t n = 0;
    for (int i = n_kept; i < n_tokens_; ++i) n += tokens_[index(i)].n_evicted;
    return n;
}

void UndoLog::begin_token(const Head& head) noexcept {
    records_ = true;
    ++n_tokens_;
    token() = {head.count(), n_saved_, n_moves_, false, 0, head.dropped.value_or(DroppedScores{})};
}

void UndoLog::save_importance(const Head& head) noexcept {
    float* snapshot = importance_.data() + index(n_snapshots_++) * snapshot_size_;
    token().has_importance = true;
    for (int i = 0; i < head.count(); ++i) snapshot[i] = head.importance(i);
}

void UndoLog::save_dropped(const Head& head, const std::uint8_t* mask,
                           const KernelTable& kernels) noexcept {
    const PageLayout& layout = head.layout();
    EntryCopies copies(layout, kernels);
    for (int i = 0; i < head.count(); ++i) {
        if (mask[i] != 0) continue;
        const Slot from = head.place(i);
        std::byte* to = page(head, n_saved_);
        const int to_slot = layout.slot_of(n_saved_);
        copies.add(from.page, from.index, to, to_slot);
        copy_metadata(layout, from.page, from.index, to, to_slot);
        layout.importance(to)[to_slot] = head.importance(i);
        saved_[index(n_saved_++)] = i;
    }
}

// The steps of a commit are undone in reverse: entries go back to where they were before they
// moved, then the dropped ones come back, then the importance before the token's query.
void UndoLog::undo_last(Head& head, const KernelTable& kernels) noexcept {
    const Token& undone = token();
    const PageLayout& layout = head.layout();
    const auto copy = [&](const Slot& from, float importance, const Slot& to, float& of_entry) {
        EntryCopies(layout, kernels).add(from.page, from.index, to.page, to.index);
        copy_metadata(layout, from.page, from.index, to.page, to.index);
        of_entry = importance;
    };
    const auto importance_at = [&](int i) -> float& {
        return head.pages.importance(layout.page_of(i))[layout.slot_of(i)];
    };
    while (n_moves_ > undone.n_moves) {
        const Move move = moves_[index(--n_moves_)];
        copy(head.place(move.to), importance_at(move.to), head.place(move.from),
             importance_at(move.from));
    }
    while (n_saved_ > undone.n_saved) {
        const int i = saved_[index(--n_saved_)];
        std::byte* from = page(head, n_saved_);
        const int slot = layout.slot_of(n_saved_);
        copy({from, slot}, layout.importance(from)[slot], head.place(i), importance_at(i));
    }
    head.begin_with(undone.count);
    if (undone.has_importance) {
        const float* snapshot = importance_.data() + index(--n_snapshots_) * snapshot_size_;
        for (int i = 0; i < undone.count; ++i) importance_at(i) = snapshot[i];
    }
    if (head.dropped) head.dropped = undone.dropped;
    --n_tokens_;
}

void UndoLog::roll_back(Head& head, int n_kept, const KernelTable& kernels) noexcept {
    while (n_tokens_ > n_kept) undo_last(head, kernels);
}

}  // namespace entropykv
