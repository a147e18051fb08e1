// Remembers what the commits of draft tokens change in a KV head, so that a rollback leaves the
// head bit for bit as it was before the first wrong draft: how many entries it held, the importance
// that queries changed, the entries that an eviction dropped, and those that it moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/dropped_scores.hpp"
#include "kernels/kernels.hpp"
#include "platform/aligned_bytes.hpp"

namespace entropykv {

class Head;

class UndoLog {
public:
    // Makes room for n_drafts tokens, whose commits evict at most n_evicted entries of a head that
    // never has more than `most` entries; n_observed of them change the importance of all entries.
    void reserve(const Head& head, int n_drafts, int n_observed, int n_evicted, int most);
    std::size_t bytes() const;

    // Forgets all tokens, before a micro-batch.
    void clear() noexcept { n_tokens_ = n_saved_ = n_moves_ = n_snapshots_ = 0; }
    int tokens() const { return n_tokens_; }
    // Returns how many entries the commits of the tokens after the first n_kept ones have evicted.
    std::size_t evicted_after(int n_kept) const noexcept;

    // The following are called while a draft token is committed. begin_token() comes first,
    // end_token() last; save_importance() before queries change it; save_dropped() before an
    // eviction drops the entries that `mask` leaves out; note_move() for every entry that takes the
    // place of a dropped one; note_evicted() with the number of entries that count as evicted.
    void begin_token(const Head& head) noexcept;
    void save_importance(const Head& head) noexcept;
    void save_dropped(const Head& head, const std::uint8_t* mask,
                      const KernelTable& kernels) noexcept;
    void note_move(int from, int to) noexcept { moves_[index(n_moves_++)] = {from, to}; }
    void note_evicted(std::size_t n) noexcept { token().n_evicted += n; }

    void end_token() noexcept { records_ = false; }
    // Tells whether the commit of a draft token is under way.
    bool records() const { return records_; }

    // Undoes the commits of all tokens after the first n_kept ones.
    void roll_back(Head& head, int n_kept, const KernelTable& kernels) noexcept;

private:
    struct Token {
        int count = 0;  // entries of the head before the token's commit
        int n_saved = 0;
        int n_moves = 0;
        bool has_importance = false;
        std::size_t n_evicted = 0;
        DroppedScores dropped{};
    };
    struct Move {
        int from;
        int to;
    };
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    Token& token() { return tokens_[index(n_tokens_ - 1)]; }
    std::byte* page(const Head& head, int saved) noexcept;
    void undo_last(Head& head, const KernelTable& kernels) noexcept;

    bool records_ = false;
    int n_tokens_ = 0;
    int n_saved_ = 0;
    int n_moves_ = 0;
    int n_snapshots_ = 0;
    std::size_t snapshot_size_ = 0;
    std::vector<Token> tokens_{};
    std::vector<int> saved_{};  // numbers of the entries that were dropped
    std::vector<Move> moves_{};
    std::vector<float> importance_{};  // one snapshot for every token that changed importance
    AlignedBytes pages_{};             // copies of the dropped entries
};

}  // namespace entropykv
