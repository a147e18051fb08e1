// Evicts whole positions from llama.cpp's own cache, as README_ENTROPY_KV does: all heads keep the
// same positions, llama_memory_seq_rm removes the other ones, and saving and loading the state
// compacts the cells. This works with any backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "decide/eviction.hpp"
#include "decide/importance.hpp"

struct llama_context;

namespace entropykv {

// Lists the positions that stay, and the ranges [first, last) of positions to remove; both ascend.
struct FlatEviction {
    std::vector<std::int32_t> kept;
    std::vector<std::pair<std::int32_t, std::int32_t>> removed;
};

// Throws std::invalid_argument for a measure that does not rank by position alone, as FlatStore()
// does.
FlatEviction plan_flat_eviction(const std::vector<std::int32_t>& positions, int keep,
                                ScoreKind score, const Protection& protection);

class FlatStore {
public:
    // rope_sinks: how many first positions keep their RoPE position, whatever the shift: see
    // rope_position().
    FlatStore(llama_context* context, int budget, ScoreKind score, const Protection& protection,
              int rope_sinks);

    // Must be called before n_tokens tokens are read. Compacts if holes would slow attention down.
    // Throws std::runtime_error if llama.cpp does not save or accept its state.
    void make_room(int n_tokens);
    // Must be called after tokens at [position, position + n_tokens) were read, and evicts what
    // exceeds the budget. This and the next three functions throw std::runtime_error if llama.cpp
    // cannot remove positions.
    void settle(std::int32_t position, int n_tokens);
    void set_budget(int budget, const Protection& protection);
    void truncate(std::int32_t position);
    // Moves positions to another shift: llama.cpp rotates the keys in its next decode. Entries that
    // would be clamped to the first position after the sinks are dropped, since llama.cpp removes
    // by position and could not tell them apart.
    void rebase(int shift);
    int shift() const { return shift_; }
    void set_shift(int shift) { shift_ = shift; }  // The cache was filled at this shift.
    // Moves the store to another context of any size, which must be empty. If llama.cpp does not
    // accept the state, throws std::runtime_error, and the store stays in its old context.
    void move_to(llama_context* context);

    // Returns llama.cpp's state of the sequence; empty without entries. The cells are compacted
    // first, as they will be after loading, because sums over cells in another order would give
    // other numbers.
    std::vector<std::uint8_t> save_state();
    // Replaces the whole contents, then evicts down to the budget. If llama.cpp does not accept the
    // state, throws std::runtime_error and restores the old contents.
    void load_state(std::vector<std::int32_t> positions, const std::uint8_t* state,
                    std::size_t size, std::size_t evicted, int shift);

    const std::vector<std::int32_t>& positions() const { return positions_; }
    int budget() const { return budget_; }
    int peak() const { return peak_; }
    std::size_t evicted() const { return evicted_; }
    double eviction_seconds() const { return eviction_seconds_; }
    // Returns the bytes of the largest copy of the cells made so far, by compaction, move_to(),
    // saving or loading: llama.cpp reads and writes the state of a sequence as a whole.
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
    Protection protection_;
    int rope_sinks_;
    int shift_ = 0;
    std::vector<std::int32_t> positions_;
    int highest_cell_ = 0;  // cells that may be in use, counted from the first one
    int peak_ = 0;
    std::size_t evicted_ = 0;
    double eviction_seconds_ = 0.0;
    std::size_t largest_copy_ = 0;
};

}  // namespace entropykv
