// Attends with tiles of query rows of a KV head, one of a thread's units after another. A tile that
// is split by entries leaves a partial softmax for each of its chunks, which HeadEnd merges.
#pragma once

#include <cstddef>

#include "attention/call.hpp"

namespace entropykv {

class TileWork {
public:
    explicit TileWork(const Call& call)
        : call_(call), split_(call.split), step_(call.step), worker_(call.worker) {}

    // upcoming: the thread's next unit, or -1, which the decode kernel asks for early.
    void run(const Unit& unit, int upcoming) noexcept;

    // What is written of a tile of whole rows.
    void write_output(const RowTile& tile, const SoftmaxState& state) noexcept;
    // Adds what the rows of a tile gave to the entries; `state` is final.
    void observe(const RowTile& tile, const SoftmaxState& state) noexcept;
    void observe_decode(const RowTile& tile, const SoftmaxState& state) noexcept;
    // The queries of a tile, for run() and for observe().
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
    const float* row_weights(const RowTile& tile) noexcept;
    // Those of the rows of an echo alone.
    const float* echo_weights(const RowTile& tile) noexcept;
    // Adds what weighted rows gave to every entry; scores are computed again unless weights are
    // kept.
    void add_observed(const RowTile& tile, const SoftmaxState& state, Statistic what,
                      const float* weights, float* observed) noexcept;

    const Call& call_;
    const Split& split_;
    const Step& step_;
    Worker& worker_;
};

}  // namespace entropykv
