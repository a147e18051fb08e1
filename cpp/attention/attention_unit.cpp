// One unit of attention, and what the last unit of a head does: see attention.hpp.
#include <algorithm>
#include <cmath>

#include "attention/attention.hpp"
#include "platform/relax.hpp"

namespace entropykv {
namespace {

constexpr float kBitsPerNat = 1.44269504f;
constexpr float kNatsPerBit = 0.69314718f;

Statistic statistic_of(ScoreKind kind) {
    switch (kind) {
        case ScoreKind::attention: return Statistic::probability;
        case ScoreKind::products: return Statistic::product;
        case ScoreKind::reconstruct: return Statistic::largest_probability;
        default: return Statistic::squared_probability;
    }
}

}  // namespace

// ------------------------------------------------------------------------------------------------
// one unit

Attention::Unit Attention::unit_at(const Call& call, int unit) const noexcept {
    int head = 0;
    while (unit >= call.job->first_unit[index(head + 1)]) ++head;
    const int local = unit - call.job->first_unit[index(head)];
    if (!call.split.by_entries)
        return {tile_at(call.split, head, local * call.split.band_tiles), 0};
    const int chunks = chunks_of(call.split, total_entries(call.layer, head));
    return {tile_at(call.split, head, local / chunks), local % chunks};
}

void Attention::run_unit(const Call& call, int unit, int next) noexcept {
    const auto [tile, chunk] = unit_at(call, unit);
    if (!call.split.by_rows) {
        run_decode(call, tile, chunk, next);
    } else if (call.split.by_entries) {
        run_rows(call, tile, chunk);
    } else {
        run_band(call, tile);
    }
    std::atomic<int>& unfinished = call.job->unfinished_units[index(tile.head)];
    if (unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) finish_head(call, tile.head);
}

// The stored entries of a unit of the decode kernel; layout null: it has none. The unit must have
// been claimed by this thread: its head is then not committed, and its page table stays.
EntryRange Attention::stored_entries(const Call& call, int unit) const noexcept {
    if (unit < 0) return {};
    const auto [tile, chunk] = unit_at(call, unit);
    const int size = chunk_entries(call.split, total_entries(call.layer, tile.head));
    const int last = std::min(store_.count(call.layer, tile.head), (chunk + 1) * size);
    if (chunk * size >= last) return {};
    return {&store_.layout(call.layer), store_.pages(call.layer, tile.head), chunk * size, last};
}

void Attention::start_softmax(const Call& call, const Tile& tile, int chunk,
                              const SoftmaxState& state) const noexcept {
    const bool sinks = call.params->sinks != nullptr && chunk == 0;
    const float unit = call.split.by_rows ? kBitsPerNat : 1.0f;
    const int rows = call.split.by_rows ? kRowTile : tile.count;  // the last vector is whole
    for (int r = 0; r < rows; ++r) {
        const int query_head = tile.head * call.split.group + (tile.first + r) % call.split.group;
        state.max[r] = sinks ? call.params->sinks[query_head] * unit : kMaskedLogit;
        state.sum[r] = sinks ? 1.0f : 0.0f;
        state.weighted[r] = 0.0f;
    }
}

SoftmaxState Attention::worker_state(const Call& call) noexcept {
    Worker& worker = workers_[index(call.thread)];
    float* softmax = worker.softmax.data();
    return {softmax, softmax + kRowTile, softmax + 2 * kRowTile, worker.output.data()};
}

SoftmaxState Attention::partial_state(const Call& call, const Tile& tile, int chunk) noexcept {
    const int chunks = chunks_of(call.split, total_entries(call.layer, tile.head));
    const std::size_t rows = index(call.split.tile_rows);
    const std::size_t size = rows * index(store_.layout(call.layer).v_stride + 3);
    const int slot = call.job->first_unit[index(tile.head)] + tile.number * chunks + chunk;
    float* start = partials_.data() + index(slot) * size;
    return {start, start + rows, start + 2 * rows, start + 3 * rows};
}

// The oldest position that a token of the micro-batch sees, relative to the first token.
float Attention::oldest_relative(int layer, int token) const noexcept {
    const std::int32_t oldest = store_.shape(layer).oldest_seen(base_position_ + token);
    return static_cast<float>(oldest - base_position_);
}

void Attention::load_queries(const Call& call, const Tile& tile) noexcept {
    const PageLayout& layout = store_.layout(call.layer);
    Worker& worker = workers_[index(call.thread)];
    float* query = worker.query.data();
    float* positions = worker.softmax.data() + 3 * kRowTile;
    float* oldest = worker.softmax.data() + 5 * kRowTile;
    float* slopes = worker.softmax.data() + 6 * kRowTile;
    const std::size_t lanes = call.split.by_rows ? kRowTile : 1;
    const std::size_t stride = call.split.by_rows ? 1 : index(layout.k_stride);
    std::fill(query, query + index(call.split.tile_rows) * index(layout.k_stride), 0.0f);
    for (int r = 0; r < tile.count; ++r) {
        const int row = tile.first + r;
        const int token = row / call.split.group;
        const int query_head = tile.head * call.split.group + row % call.split.group;
        const float* source = call.query->row(token, query_head);
        if (call.params->slopes != nullptr) slopes[r] = call.params->slopes[query_head];
        for (int d = 0; d < layout.k_dim; ++d)
            query[index(d) * lanes + index(r) * stride] = source[d] * call.params->scale;
        positions[r] = static_cast<float>(token);
        oldest[r] = oldest_relative(call.layer, token);
    }
}

// Visits the ranges of entries [first, last) (stored ones first, then staged ones) that rows of
// the tile see, with whether some row does not see all of the range.
template <typename Visit>
void Attention::over_ranges(const Call& call, const Tile& tile, int first, int last,
                            Visit visit) noexcept {
    const PageLayout& layout = store_.layout(call.layer);
    const int count = store_.count(call.layer, tile.head);
    const bool windowed = store_.shape(call.layer).window > 0;
    const auto part = [&](const std::byte* const* pages, int offset, int from, int to,
                          bool masked) {
        from = std::max(from, first - offset);
        to = std::min(to, last - offset);
        if (from < to) visit(EntryRange{&layout, pages, from, to}, offset + from, masked);
    };
    part(store_.pages(call.layer, tile.head), 0, 0, count, windowed);
    const int first_token = tile.first / call.split.group;
    const int last_token = (tile.first + tile.count - 1) / call.split.group;
    std::byte* const* staged = store_.staging(call.layer, tile.head);
    part(staged, count, 0, first_token + 1, windowed);
    part(staged, count, first_token + 1, last_token + 1, true);
}

PromptTask Attention::prompt_task(const Call& call, const Tile& tile,
                                  const SoftmaxState& state) noexcept {
    Worker& worker = workers_[index(call.thread)];
    PromptTask task{};
    task.query = worker.query.data();
    task.base_position = base_position_;
    task.row_positions = worker.softmax.data() + 3 * kRowTile;
    task.rows = tile.count;
    task.softcap = call.params->softcap;
    task.row_oldest = worker.softmax.data() + 5 * kRowTile;
    if (call.params->slopes != nullptr) task.row_slopes = worker.softmax.data() + 6 * kRowTile;
    task.scratch = worker.kernel.data();
    task.entropy = track_entropy_;
    task.state = state;
    return task;
}

void Attention::run_band(const Call& call, const Tile& first) noexcept {
    const int end = std::min(first.number + call.split.band_tiles, call.split.tiles);
    for (int number = first.number; number < end; ++number)
        run_rows(call, tile_at(call.split, first.head, number), 0);
}

void Attention::run_rows(const Call& call, const Tile& tile, int chunk) noexcept {
    const SoftmaxState state = worker_state(call);
    const int total = total_entries(call.layer, tile.head);
    const int size = call.split.by_entries ? chunk_entries(call.split, total) : total;
    const int v_stride = store_.layout(call.layer).v_stride;
    load_queries(call, tile);
    start_softmax(call, tile, chunk, state);
    std::fill(state.output, state.output + index(v_stride) * kRowTile, 0.0f);
    PromptTask task = prompt_task(call, tile, state);
    if (is_observed(call, tile) && keeps_weights(call.split, total))
        task.kept = workers_[index(call.thread)].kept.data();
    over_ranges(call, tile, chunk * size, std::min(total, (chunk + 1) * size),
                [&](const EntryRange& range, int, bool masked) {
                    task.entries = range;
                    task.masked = masked;
                    kernels_.prompt(task);
                    if (task.kept != nullptr) task.kept += kept_floats(range);
                });
    // From [v_stride][kRowTile] to a row each; the query tile is still needed, the kernel's scratch
    // is not.
    const SoftmaxState rows = call.split.by_entries
                                  ? partial_state(call, tile, chunk)
                                  : SoftmaxState{state.max, state.sum, state.weighted,
                                                 workers_[index(call.thread)].kernel.data()};
    for (int r = 0; r < tile.count; ++r) {
        rows.max[r] = state.max[r];
        rows.sum[r] = state.sum[r];
        rows.weighted[r] = state.weighted[r];
        for (int d = 0; d < v_stride; ++d)
            rows.output[index(r) * index(v_stride) + index(d)] = state.output[d * kRowTile + r];
    }
    if (call.split.by_entries) return;
    write_output(call, tile, rows);
    note_entropy(call, tile, rows);
    observe(call, tile, rows);
}

void Attention::run_decode(const Call& call, const Tile& tile, int chunk, int next) noexcept {
    const PageLayout& layout = store_.layout(call.layer);
    const SoftmaxState state = partial_state(call, tile, chunk);
    const int total = total_entries(call.layer, tile.head);
    const int size = chunk_entries(call.split, total);
    load_queries(call, tile);
    start_softmax(call, tile, chunk, state);
    std::fill(state.output, state.output + index(tile.count) * index(layout.v_stride), 0.0f);
    DecodeTask task{};
    task.query = workers_[index(call.thread)].query.data();
    task.rows = tile.count;
    task.softcap = call.params->softcap;
    const bool windowed = store_.shape(call.layer).window > 0;
    task.oldest = windowed ? oldest_relative(call.layer, 0) : kMaskedLogit;
    task.position = base_position_;
    if (call.params->slopes != nullptr)
        task.slopes = workers_[index(call.thread)].softmax.data() + 6 * kRowTile;
    task.state = state;
    task.logits_stride = longest_;
    task.upcoming = stored_entries(call, next);
    over_ranges(call, tile, chunk * size, std::min(total, (chunk + 1) * size),
                [&](const EntryRange& range, int offset, bool) {
                    task.entries = range;
                    task.logits = observing_ ? logits_of(call, tile.head) + offset : nullptr;
                    kernels_.decode(task);
                });
}

// ------------------------------------------------------------------------------------------------
// the end of a head

void Attention::finish_head(const Call& call, int head) noexcept {
    for (int number = 0; call.split.by_entries && number < call.split.tiles; ++number) {
        const Tile tile = tile_at(call.split, head, number);
        const SoftmaxState state = merge(call, tile);
        write_output(call, tile, state);
        note_entropy(call, tile, state);
        if (call.split.by_rows) {
            load_queries(call, tile);
            observe(call, tile, state);
        } else {
            observe_decode(call, tile, state);
        }
    }
    if (track_entropy_) {
        LayerEntropy& entropy = entropy_[index(call.layer)];
        for (int row = 0; row < n_text_ * call.split.group; ++row)
            entropy.sums[index(head * call.split.group + row % call.split.group)] +=
                entropy.last[index(head * call.split.rows + row)];
        if (head == 0) entropy.rows += n_text_;
    }
    // Expected queries are those of the layer that wrote the keys.
    if (call.reader == 0)
        store_.add_queries(call.layer, head, n_text_, call.params->scale,
                           [&](int token, int query) {
                               return call.query->row(token, head * call.split.group + query);
                           });
    if (call.reader + 1 < store_.shape(call.layer).readers) {
        carry(call, head, sum_observed(call, head));
    } else if (queues(call.layer)) {
        queue_commit(call, head, sum_observed(call, head));
    } else if (!shared_choice_) {
        commit(call, head, carry(call, head, sum_observed(call, head)));
    } else if (call.job->unfinished_heads.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        commit_layer(call);
    }
}

// Adds up what two sets of queries gave to each of n entries, or takes the larger one.
void Attention::add_up(float* total, const float* more, int n) const noexcept {
    if (store_.settings().importance.by_largest()) {
        for (int j = 0; j < n; ++j) total[j] = std::max(total[j], more[j]);
    } else {
        for (int j = 0; j < n; ++j) total[j] += more[j];
    }
}

// Adds up what the readers of a layer saw of a head; returns what they saw up to this one.
float* Attention::carry(const Call& call, int head, float* observed) noexcept {
    if (store_.shape(call.layer).readers == 1) return observed;
    Carried& carried = carried_[index(call.layer)];
    const float squares = store_.measures() ? output_squares(call, head) : 0.0f;
    carried.squares[index(head)] =
        squares + (call.reader > 0 ? carried.squares[index(head)] : 0.0f);
    if (observed == nullptr) return nullptr;
    float* total = carried.observed.data() + index(head) * longest_;
    const int n = total_entries(call.layer, head);
    if (call.reader == 0) {
        std::copy(observed, observed + n, total);
    } else {
        add_up(total, observed, n);
    }
    return total;
}

void Attention::commit(const Call& call, int head, const float* observed) noexcept {
    const bool shared = store_.shape(call.layer).readers > 1;
    const float squares = shared              ? carried_[index(call.layer)].squares[index(head)]
                          : store_.measures() ? output_squares(call, head)
                                              : 0.0f;
    store_.commit(call.layer, head, n_text_, observed, squares, call.thread);
}

bool Attention::queues(int layer) const noexcept {
    return n_tokens_ == 1 && store_.shape(layer).readers == 1 && !shared_choice_;
}

void Attention::queue_commit(const Call& call, int head, const float* observed) noexcept {
    Commit& commit = commits_[index(commits_before_ + head)];
    commit.layer = call.layer;
    commit.head = head;
    commit.observed = observed;
    commit.squares = store_.measures() ? output_squares(call, head) : 0.0f;
    commit.ready.store(true, std::memory_order_release);
}

// The thread's own of the heads before `limit`. Those of this layer become ready without anybody's
// waiting.
void Attention::run_commits(int limit, int thread) noexcept {
    for (int& next = next_commit_[index(thread)]; next < limit; next += n_working_) {
        const Commit& commit = commits_[index(next)];
        wait_for(commit.ready);
        store_.commit(commit.layer, commit.head, n_tokens_, commit.observed, commit.squares,
                      thread);
    }
}

// All heads by the sum of what they observed. Their entries are in the same places as long as they
// hold the same number.
void Attention::commit_layer(const Call& call) noexcept {
    const int n_heads = store_.shape(call.layer).n_head_kv;
    const int n = total_entries(call.layer, 0);
    float* shared = carry(call, 0, sum_observed(call, 0));
    for (int head = 1; shared != nullptr && head < n_heads; ++head) {
        const float* more = carry(call, head, sum_observed(call, head));
        add_up(shared, more, n);
    }
    for (int head = 0; head < n_heads; ++head) commit(call, head, shared);
}

// Sum of the squared norms of a head's outputs, all queries and query heads of its group.
float Attention::output_squares(const Call& call, int head) const noexcept {
    const LayerShape& shape = store_.shape(call.layer);
    const std::size_t size = index(call.split.group * shape.v_dim);
    double sum = 0.0;
    for (int token = 0; token < n_text_; ++token) {
        const float* output =
            call.output + index(token * shape.n_head * shape.v_dim) + index(head) * size;
        float of_token = 0.0f;
        for (std::size_t d = 0; d < size; ++d) of_token += output[d] * output[d];
        sum += of_token;
    }
    return static_cast<float>(sum);
}

// Merges the partial softmaxes of a tile into its first chunk's.
SoftmaxState Attention::merge(const Call& call, const Tile& tile) noexcept {
    const int chunks = chunks_of(call.split, total_entries(call.layer, tile.head));
    const int stride = store_.layout(call.layer).v_stride;
    const SoftmaxState all = partial_state(call, tile, 0);
    const float nats = call.split.by_rows ? kNatsPerBit : 1.0f;
    for (int r = 0; chunks > 1 && r < tile.count; ++r) {
        float max = all.max[r];
        for (int chunk = 1; chunk < chunks; ++chunk)
            max = std::max(max, partial_state(call, tile, chunk).max[r]);
        float sum = 0.0f;
        float weighted = 0.0f;
        float* output = all.output + index(r) * index(stride);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const SoftmaxState part = partial_state(call, tile, chunk);
            const float shift = std::max((part.max[r] - max) * nats, -200.0f);
            const float factor = part.sum[r] == 0.0f ? 0.0f : std::exp(shift);
            weighted += factor * (part.weighted[r] + part.sum[r] * shift);
            sum += factor * part.sum[r];
            const float* more = part.output + index(r) * index(stride);
            for (int d = 0; d < stride; ++d)
                output[d] = (chunk == 0 ? 0.0f : output[d]) + factor * more[d];
        }
        all.max[r] = max;
        all.sum[r] = sum;
        all.weighted[r] = weighted;
    }
    return all;
}

void Attention::write_output(const Call& call, const Tile& tile,
                             const SoftmaxState& state) noexcept {
    const PageLayout& layout = store_.layout(call.layer);
    const int n_head = store_.shape(call.layer).n_head;
    for (int r = 0; r < tile.count; ++r) {
        const int row = tile.first + r;
        const int query_head = tile.head * call.split.group + row % call.split.group;
        const int output_row = row / call.split.group * n_head + query_head;
        float* output = call.output + index(output_row) * index(layout.v_dim);
        const float* source = state.output + index(r) * index(layout.v_stride);
        const float scale = 1.0f / state.sum[r];
        for (int d = 0; d < layout.v_dim; ++d) output[d] = source[d] * scale;
    }
}

void Attention::note_entropy(const Call& call, const Tile& tile,
                             const SoftmaxState& state) noexcept {
    if (!track_entropy_) return;
    std::vector<float>& last = entropy_[index(call.layer)].last;
    for (int r = 0; r < tile.count; ++r) {
        // A query that is no number has no entropy, and must not spoil the sums of the others.
        const float nats = std::log(state.sum[r]) - state.weighted[r] / state.sum[r];
        last[index(tile.head * call.split.rows + tile.first + r)] =
            nats > 0.0f ? nats * kBitsPerNat : 0.0f;
    }
}

float* Attention::logits_of(const Call& call, int head) noexcept {
    return logits_.data() + index(head * call.split.group) * longest_;
}

// The band of a tile, counted from the first observed one.
int Attention::band_of(const Call& call, int tile) const noexcept {
    const int size = call.split.band_tiles;
    return tile / size - first_observed_tile(call.split) / size;
}

float* Attention::observed_of(const Call& call, int head, int band) noexcept {
    const std::size_t turn = call.layer % 2 == 0 ? 0 : observed_turn_;
    return observed_.data() + turn + index(head * observed_bands(call.split) + band) * longest_;
}

// How much each row of a tile counts: nothing before the observation window. What is divided by an
// exposure decays within the micro-batch too, as the exposure does.
const float* Attention::row_weights(const Call& call, const Tile& tile) noexcept {
    float* weights = workers_[index(call.thread)].softmax.data() + 4 * kRowTile;
    const int first_row = first_observed_row(call.split) - tile.first;
    const ImportanceSettings& importance = store_.settings().importance;
    const bool decays = importance.by_exposure && importance.decay > 0.0f;
    for (int r = 0; r < kRowTile; ++r) {
        const bool counts = r >= first_row && r < tile.count;
        const int later = n_tokens_ - 1 - (tile.first + r) / call.split.group;
        weights[r] = !counts ? 0.0f : decays ? decay_factor(importance.decay, later) : 1.0f;
    }
    return weights;
}

bool Attention::is_observed(const Call& call, const Tile& tile) const noexcept {
    return observing_ && first_observed_row(call.split) < tile.first + tile.count;
}

void Attention::observe(const Call& call, const Tile& tile, const SoftmaxState& state) noexcept {
    if (!is_observed(call, tile)) return;
    const int total = total_entries(call.layer, tile.head);
    const Statistic what = statistic_of(store_.settings().importance.kind);
    const float* weights = row_weights(call, tile);
    const auto neighbourhood = static_cast<float>(store_.neighbourhood());
    const int band = band_of(call, tile.number);
    float* observed = observed_of(call, tile.head, band);
    const bool begins =
        tile.number == first_observed_tile(call.split) || tile.number % call.split.band_tiles == 0;
    if (begins) std::fill(observed, observed + total, 0.0f);
    PromptTask task = prompt_task(call, tile, state);
    if (keeps_weights(call.split, total)) task.kept = workers_[index(call.thread)].kept.data();
    over_ranges(call, tile, 0, total, [&](const EntryRange& range, int offset, bool masked) {
        task.entries = range;
        task.masked = masked;
        kernels_.prompt_observe(task, what, weights, neighbourhood, observed + offset);
        if (task.kept != nullptr) task.kept += kept_floats(range);
    });
}

void Attention::observe_decode(const Call& call, const Tile& tile,
                               const SoftmaxState& state) noexcept {
    if (!observing_) return;
    const int total = total_entries(call.layer, tile.head);
    const Statistic what = statistic_of(store_.settings().importance.kind);
    float* observed = observed_of(call, tile.head, 0);
    std::fill(observed, observed + total, 0.0f);
    for (int r = 0; r < tile.count; ++r)
        kernels_.logits_observe(logits_of(call, tile.head) + index(r) * longest_, total, what,
                                state.max[r], state.sum[r], observed);
}

// What the observation window gave to every entry of a head, or null.
float* Attention::sum_observed(const Call& call, int head) noexcept {
    if (!observing_) return nullptr;
    float* total = observed_of(call, head, 0);
    const int n = total_entries(call.layer, head);
    for (int band = 1; band < observed_bands(call.split); ++band) {
        add_up(total, observed_of(call, head, band), n);
    }
    return total;
}

}  // namespace entropykv
