// What the thread that finishes a head's last unit does: it merges what the units left, writes the
// outputs, and hands on what the queries gave to the head's entries, to be committed.
#pragma once

#include <cstddef>

#include "attention/call.hpp"
#include "attention/commit_queue.hpp"
#include "attention/tile_work.hpp"

namespace entropykv {

// Whether the heads of a layer wait in the queue: those of single tokens, which nobody else needs.
inline bool queues(const Step& step, const LayerShape& shape, bool shared_choice) noexcept {
    return step.n_tokens == 1 && shape.readers == 1 && !shared_choice;
}

class HeadEnd {
public:
    // shared_choice: every head of a layer ranks by what all of them observed.
    HeadEnd(const Call& call, CommitQueue& commits, bool shared_choice)
        : call_(call), commits_(commits), shared_choice_(shared_choice) {}

    void run(int head) noexcept;

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    void end_tiles(int head) noexcept;
    SoftmaxState merge(TileWork& work, const RowTile& tile) noexcept;
    void merge_row(TileWork& work, const RowTile& tile, int chunks, int row) noexcept;
    float output_squares(int head) const noexcept;
    float* carry(int head) noexcept;
    float* carry_looked_up(int head) noexcept;
    void commit(int head, const float* observed, const float* looked_up) noexcept;
    void commit_layer() noexcept;

    const Call& call_;
    CommitQueue& commits_;
    bool shared_choice_;
};

}  // namespace entropykv
