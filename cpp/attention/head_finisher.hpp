// The thread that finishes the last unit of a head runs this: it merges the partial results of the
// units, writes the outputs, and commits the head by what the queries gave to its entries.
#pragma once

#include <cstddef>

#include "attention/attention_call.hpp"
#include "attention/commit_queue.hpp"
#include "attention/tile_work.hpp"

namespace entropykv {

// Tells whether the heads of a layer are committed through the queue: when a single token is read,
// and no other reader or head needs what they observed.
inline bool queues(const Step& step, const LayerShape& shape, bool shared_choice) noexcept {
    return step.n_tokens == 1 && shape.readers == 1 && !shared_choice;
}

class HeadFinisher {
public:
    // shared_choice: see Attention::set_shared_choice().
    HeadFinisher(const AttentionCall& call, CommitQueue& commits, bool shared_choice)
        : call_(call), commits_(commits), shared_choice_(shared_choice) {}

    // finish() writes the outputs of a head; run() commits it, too.
    void finish(int head) noexcept;
    void run(int head) noexcept;

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    void finish_tiles(int head) noexcept;
    SoftmaxState merge(TileWork& work, const RowTile& tile) noexcept;
    void merge_row(TileWork& work, const RowTile& tile, int chunks, int row) noexcept;
    float output_squares(int head) const noexcept;
    float* carry(int head) noexcept;
    float* carry_echo_shares(int head) noexcept;
    void commit(int head, const float* observed, const float* echo_shares) noexcept;
    void commit_layer() noexcept;

    const AttentionCall& call_;
    CommitQueue& commits_;
    bool shared_choice_;
};

}  // namespace entropykv
