// Attends with tiles of query rows of a KV head, one unit of the thread after another. A tile that
// is split by entries leaves one partial softmax per chunk, which HeadFinisher merges.
#pragma once

#include <cstddef>

#include "attention/attention_call.hpp"

namespace entropykv {

class TileWork {
public:
    explicit TileWork(const AttentionCall& call)
        : call_(call), split_(call.split), step_(call.step), worker_(call.worker) {}

    // upcoming: the next unit of the thread, whose first entries the decode kernel prefetches; -1:
    // none.
    void run(const Unit& unit, int upcoming) noexcept;

    // Writes the outputs of a tile whose rows have attended to all of their entries.
    void write_output(const RowTile& tile, const SoftmaxState& state) noexcept;
    // Adds what the rows of a tile gave to the entries; `state` must be final.
    void observe(const RowTile& tile, const SoftmaxState& state) noexcept;
    void observe_decode(const RowTile& tile, const SoftmaxState& state) noexcept;
    // Loads the queries of a tile, for run() and observe().
    void load_queries(const RowTile& tile) noexcept;
    SoftmaxState partial(const RowTile& tile, int chunk) noexcept;

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    void attend_rows(const RowTile& tile, int chunk) noexcept;
    void attend_token(const RowTile& tile, int chunk, int upcoming) noexcept;
    EntryRange stored_entries(int unit) const noexcept;
    PromptTask prompt_task(const RowTile& tile, const SoftmaxState& state) noexcept;
    template <typename Visit>
    void over_ranges(const RowTile& tile, int first, int last, Visit visit) noexcept;
    void start_softmax(const RowTile& tile, int chunk, const SoftmaxState& state) const noexcept;
    float sink_of(const RowTile& tile, int r) const noexcept;
    const float* weights_of(const RowTile& tile, int first, int end) noexcept;
    // Return 1 for the rows that count towards importance or belong to an echo, and 0 for all
    // others.
    const float* row_weights(const RowTile& tile) noexcept;
    const float* echo_weights(const RowTile& tile) noexcept;
    // Adds what the rows gave to every entry, times their weights. Attention scores are computed
    // again unless the attention weights were kept.
    void add_observed(const RowTile& tile, const SoftmaxState& state, Statistic what,
                      const float* weights, float* observed) noexcept;

    const AttentionCall& call_;
    const Split& split_;
    const Step& step_;
    Worker& worker_;
};

}  // namespace entropykv
