// Position-level eviction in llama.cpp's own cache, as the BitNet document does it: one choice for
// all heads, llama_memory_seq_rm, and compaction by a round trip of the state. Any backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "decide/eviction.hpp"
#include "decide/importance.hpp"

struct llama_context;

namespace entropykv {

// Ranges [first, last) of positions to remove, ascending: a plan to print, test and apply.
struct FlatEviction {
    std::vector<std::int32_t> kept;
    std::vector<std::pair<std::int32_t, std::int32_t>> removed;
};

FlatEviction plan_flat_eviction(const std::vector<std::int32_t>& positions, int keep,
                                ScoreKind score, float entropy_variation,
                                const Protection& protection);

class FlatStore {
public:
    // rope_sinks: first positions that keep their rope position whatever the shift (rope.hpp).
    FlatStore(llama_context* context, int budget, ScoreKind score, float entropy_variation,
              const Protection& protection, int rope_sinks);

    // Before reading n_tokens: compacts where holes would cost attention time.
    void make_room(int n_tokens);
    // After they were read at [position, position + n_tokens): evicts down to the budget.
    void settle(std::int32_t position, int n_tokens);
    void set_budget(int budget, const Protection& protection);
    void truncate(std::int32_t position);
    // Positions go on at another shift: llama.cpp rotates the keys in its next decode. Entries that
    // would be clamped to the first position after the sinks are dropped: llama.cpp's cache removes
    // by position, and could not tell them apart.
    void rebase(int shift);
    int shift() const { return shift_; }
    void set_shift(int shift) { shift_ = shift; }  // of a cache that was filled at it
    // The store goes on in another context (larger or smaller) that holds nothing yet. Throws
    // std::runtime_error where llama.cpp does not take what is held: it goes on in this one then.
    void move_to(llama_context* context);

    // llama.cpp's own bytes. The cells are compacted first, as they will be in whoever loads them:
    // sums over cells in another order would be other numbers.
    std::vector<std::uint8_t> save_state();
    // Replaces everything, and evicts down to the budget. Throws std::runtime_error where llama.cpp
    // does not take the state; what was there before is there again then.
    void load_state(std::vector<std::int32_t> positions, const std::uint8_t* state,
                    std::size_t size, std::size_t evicted, int shift);

    const std::vector<std::int32_t>& positions() const { return positions_; }
    int budget() const { return budget_; }
    int peak() const { return peak_; }
    std::size_t evicted() const { return evicted_; }
    std::size_t compactions() const { return compactions_; }
    double eviction_seconds() const { return eviction_seconds_; }
    // Bytes of the largest copy of the cells that compact(), move_to() or a save or load has made:
    // llama.cpp gives and takes a sequence's state as a whole.
    std::size_t largest_copy() const { return largest_copy_; }

private:
    void evict(int keep);
    void remove(std::int32_t first, std::int32_t last);
    void compact();
    std::vector<std::uint8_t> saved_state();
    static void restore_state(llama_context* context, const std::uint8_t* state, std::size_t size);
    void replace_state(const std::uint8_t* state, std::size_t size);

    llama_context* context_;
    int budget_;
    ScoreKind score_;
    float entropy_variation_;
    Protection protection_;
    int rope_sinks_;
    int shift_ = 0;
    std::vector<std::int32_t> positions_;
    int highest_cell_ = 0;  // cells that may be in use, counted from the first
    int peak_ = 0;
    std::size_t evicted_ = 0;
    std::size_t compactions_ = 0;
    double eviction_seconds_ = 0.0;
    std::size_t largest_copy_ = 0;
};

}  // namespace entropykv
