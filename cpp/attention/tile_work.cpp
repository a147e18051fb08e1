#include "attention/tile_work.hpp"

#include <algorithm>
#include <cmath>

namespace entropykv {
namespace {

constexpr float kBitsPerNat = 1.44269504f;

}  // namespace

void TileWork::run(const Unit& unit, int upcoming) noexcept {
    const auto [tile, chunk] = unit;
    if (!split_.by_rows) return attend_token(tile, chunk, upcoming);
    if (split_.by_entries) return attend_rows(tile, chunk);
    const int end = std::min(tile.number + split_.band_tiles, split_.tiles);
    for (int number = tile.number; number < end; ++number)
        attend_rows(split_.tile(tile.head, number), 0);
}

// Returns the stored entries of a unit of the decode kernel; its layout is null if the unit has
// none. This thread must have claimed the unit, so that no other thread commits the head and
// changes its page table meanwhile.
EntryRange TileWork::stored_entries(int unit) const noexcept {
    if (unit < 0) return {};
    const auto [tile, chunk] = call_.unit(unit);
    const int size = split_.chunk_entries(call_.total(tile.head));
    const int last = std::min(call_.head(tile.head).count(), (chunk + 1) * size);
    if (chunk * size >= last) return {};
    return {&call_.layout(), call_.head(tile.head).pages.all().data(), chunk * size, last};
}

void TileWork::start_softmax(const RowTile& tile, int chunk,
                             const SoftmaxState& state) const noexcept {
    const bool sinks = call_.params.sinks != nullptr && chunk == 0;
    const float unit = split_.by_rows ? kBitsPerNat : 1.0f;
    // The prompt kernel computes whole vectors of rows.
    const int rows = split_.by_rows ? kRowTile : tile.count;
    for (int r = 0; r < rows; ++r) {
        state.max[r] = sinks ? sink_of(tile, r) * unit : kMaskedLogit;
        state.sum[r] = sinks ? 1.0f : 0.0f;
        state.weighted[r] = 0.0f;
    }
}

// Returns the logit of a row's sink, relative to the logits that the stored keys have. Rows behind
// the tile's only fill a vector.
float TileWork::sink_of(const RowTile& tile, int r) const noexcept {
    const int of_group = (tile.first + r) % split_.group;
    const float sink = call_.params.sinks[tile.head * split_.group + of_group];
    if (r >= tile.count) return sink;
    return sink - call_.missing_logit(tile.head, (tile.first + r) / split_.group, of_group);
}

SoftmaxState TileWork::partial(const RowTile& tile, int chunk) noexcept {
    const int chunks = split_.chunks(call_.total(tile.head));
    const std::size_t rows = index(split_.tile_rows);
    const std::size_t size = rows * index(call_.layout().v_stride + 3);
    const int slot = call_.units.first_unit(tile.head) + tile.number * chunks + chunk;
    float* start = call_.partials + index(slot) * size;
    return {start, start + rows, start + 2 * rows, start + 3 * rows};
}

void TileWork::load_queries(const RowTile& tile) noexcept {
    const PageLayout& layout = call_.layout();
    float* query = worker_.query();
    const std::size_t lanes = split_.by_rows ? kRowTile : 1;
    const std::size_t stride = split_.by_rows ? 1 : index(layout.k_stride);
    std::fill(query, query + index(split_.tile_rows) * index(layout.k_stride), 0.0f);
    for (int r = 0; r < tile.count; ++r) {
        const int row = tile.first + r;
        const int token = row / split_.group;
        const int query_head = tile.head * split_.group + row % split_.group;
        if (call_.params.slopes != nullptr) worker_.slopes()[r] = call_.params.slopes[query_head];
        call_.load_query(tile.head, token, row % split_.group, query + index(r) * stride, lanes);
        worker_.positions()[r] = static_cast<float>(step_.last_seen(token));
        worker_.oldest()[r] = step_.oldest_relative(call_.shape(), token);
    }
}

// Visits those ranges of the entries [first, last) that rows of the tile attend to; stored entries
// come before staged ones. Also passes whether some row must not see all of the range.
template <typename Visit>
void TileWork::over_ranges(const RowTile& tile, int first, int last, Visit visit) noexcept {
    const PageLayout& layout = call_.layout();
    const int count = call_.head(tile.head).count();
    const bool windowed = call_.shape().window > 0;
    const auto part = [&](const std::byte* const* pages, int offset, int from, int to,
                          bool masked) {
        from = std::max(from, first - offset);
        to = std::min(to, last - offset);
        if (from < to) visit(EntryRange{&layout, pages, from, to}, offset + from, masked);
    };
    part(call_.head(tile.head).pages.all().data(), 0, 0, count, windowed);
    const int first_token = step_.last_seen(tile.first / split_.group);
    const int last_token = step_.last_seen((tile.first + tile.count - 1) / split_.group);
    std::byte* const* staged = call_.staging(tile.head);
    part(staged, count, 0, first_token + 1, windowed);
    part(staged, count, first_token + 1, last_token + 1, true);
}

PromptTask TileWork::prompt_task(const RowTile& tile, const SoftmaxState& state) noexcept {
    PromptTask task{};
    task.query = worker_.query();
    task.base_position = step_.base_position;
    task.row_positions = worker_.positions();
    task.rows = tile.count;
    task.softcap = call_.params.softcap;
    task.row_oldest = worker_.oldest();
    if (call_.params.slopes != nullptr) task.row_slopes = worker_.slopes();
    task.scratch = worker_.kernel();
    task.entropy = call_.entropies.tracks();
    task.state = state;
    return task;
}

void TileWork::attend_rows(const RowTile& tile, int chunk) noexcept {
    const SoftmaxState state = worker_.state();
    const int total = call_.total(tile.head);
    const int size = split_.by_entries ? split_.chunk_entries(total) : total;
    const int v_stride = call_.layout().v_stride;
    load_queries(tile);
    start_softmax(tile, chunk, state);
    std::fill(state.output, state.output + index(v_stride) * kRowTile, 0.0f);
    PromptTask task = prompt_task(tile, state);
    if (step_.observes(split_, tile) && step_.keeps_weights(split_, total))
        task.kept = worker_.kept();
    over_ranges(tile, chunk * size, std::min(total, (chunk + 1) * size),
                [&](const EntryRange& range, int, bool masked) {
                    task.entries = range;
                    task.masked = masked;
                    call_.kernels.prompt(task);
                    if (task.kept != nullptr) task.kept += kept_floats(range);
                });
    // The output is transposed from [v_stride][kRowTile] to one row per query. The query tile is
    // still needed then, but the scratch of the kernel is free.
    const SoftmaxState rows =
        split_.by_entries ? partial(tile, chunk)
                          : SoftmaxState{state.max, state.sum, state.weighted, worker_.kernel()};
    for (int r = 0; r < tile.count; ++r) {
        rows.max[r] = state.max[r];
        rows.sum[r] = state.sum[r];
        rows.weighted[r] = state.weighted[r];
        for (int d = 0; d < v_stride; ++d)
            rows.output[index(r) * index(v_stride) + index(d)] = state.output[d * kRowTile + r];
    }
    if (split_.by_entries) return;
    write_output(tile, rows);
    call_.entropies.note(call_.layer, split_, tile, rows);
    observe(tile, rows);
}

void TileWork::attend_token(const RowTile& tile, int chunk, int upcoming) noexcept {
    const PageLayout& layout = call_.layout();
    const SoftmaxState state = partial(tile, chunk);
    const int total = call_.total(tile.head);
    const int size = split_.chunk_entries(total);
    load_queries(tile);
    start_softmax(tile, chunk, state);
    std::fill(state.output, state.output + index(tile.count) * index(layout.v_stride), 0.0f);
    DecodeTask task{};
    task.query = worker_.query();
    task.rows = tile.count;
    task.softcap = call_.params.softcap;
    const bool windowed = call_.shape().window > 0;
    task.oldest = windowed ? step_.oldest_relative(call_.shape(), 0) : kMaskedLogit;
    task.position = step_.base_position;
    if (call_.params.slopes != nullptr) task.slopes = worker_.slopes();
    task.state = state;
    task.logits_stride = call_.observations.longest();
    task.upcoming = stored_entries(upcoming);
    float* logits = call_.observations.logits(tile.head * split_.group);
    over_ranges(tile, chunk * size, std::min(total, (chunk + 1) * size),
                [&](const EntryRange& range, int offset, bool) {
                    task.entries = range;
                    task.logits = step_.observing ? logits + offset : nullptr;
                    call_.kernels.decode(task);
                });
}

void TileWork::write_output(const RowTile& tile, const SoftmaxState& state) noexcept {
    const PageLayout& layout = call_.layout();
    const int n_head = call_.shape().n_head;
    for (int r = 0; r < tile.count; ++r) {
        const int row = tile.first + r;
        const int query_head = tile.head * split_.group + row % split_.group;
        const int output_row = row / split_.group * n_head + query_head;
        float* output = call_.output + index(output_row) * index(layout.v_dim);
        const float* source = state.output + index(r) * index(layout.v_stride);
        const float scale = 1.0f / state.sum[r];
        for (int d = 0; d < layout.v_dim; ++d) output[d] = source[d] * scale;
    }
}

// Returns 1 for every row of a tile from `first` to `end` of the micro-batch, and 0 for the others.
const float* TileWork::weights_of(const RowTile& tile, int first, int end) noexcept {
    float* weights = worker_.weights();
    for (int r = 0; r < kRowTile; ++r) {
        const int row = tile.first + r;
        weights[r] = r < tile.count && row >= first && row < end ? 1.0f : 0.0f;
    }
    return weights;
}

// Rows before the observation window do not count, nor those of an echo that only raises predicted
// shares.
const float* TileWork::row_weights(const RowTile& tile) noexcept {
    return weights_of(tile, step_.first_observed_row(split_), step_.end_of_counted_rows(split_));
}

const float* TileWork::echo_weights(const RowTile& tile) noexcept {
    return weights_of(tile, step_.first_echo_row(split_), tile.first + tile.count);
}

void TileWork::observe(const RowTile& tile, const SoftmaxState& state) noexcept {
    if (!step_.observes(split_, tile)) return;
    const int total = call_.total(tile.head);
    const int band = step_.band_of(split_, tile.number);
    const bool begins =
        tile.number == step_.first_observed_tile(split_) || tile.number % split_.band_tiles == 0;
    const auto begin = [&](float* sums) {
        if (begins) std::fill(sums, sums + total, 0.0f);
        return sums;
    };
    if (step_.observing) {
        float* observed = begin(call_.observed(tile.head, band));
        if (tile.first < step_.end_of_counted_rows(split_))
            add_observed(tile, state, step_.importance.measure().statistic, row_weights(tile),
                         observed);
    }
    if (step_.observing_echo) {
        float* echo_shares = begin(call_.echo_shares(tile.head, band));
        if (tile.first + tile.count > step_.first_echo_row(split_))
            add_observed(tile, state, Statistic::largest_probability, echo_weights(tile),
                         echo_shares);
    }
}

void TileWork::add_observed(const RowTile& tile, const SoftmaxState& state, Statistic what,
                            const float* weights, float* observed) noexcept {
    const int total = call_.total(tile.head);
    const auto neighbourhood = static_cast<float>(call_.store.components().common.neighbourhood());
    PromptTask task = prompt_task(tile, state);
    if (step_.keeps_weights(split_, total)) task.kept = worker_.kept();
    over_ranges(tile, 0, total, [&](const EntryRange& range, int offset, bool masked) {
        task.entries = range;
        task.masked = masked;
        call_.kernels.prompt_observe(task, what, weights, neighbourhood, observed + offset);
        if (task.kept != nullptr) task.kept += kept_floats(range);
    });
}

void TileWork::observe_decode(const RowTile& tile, const SoftmaxState& state) noexcept {
    if (!step_.observing) return;
    const int total = call_.total(tile.head);
    const Statistic what = step_.importance.measure().statistic;
    float* observed = call_.observed(tile.head, 0);
    std::fill(observed, observed + total, 0.0f);
    for (int r = 0; r < tile.count; ++r)
        call_.kernels.logits_observe(call_.observations.logits(tile.head * split_.group + r), total,
                                     what, state.max[r], state.sum[r], observed);
}

}  // namespace entropykv
