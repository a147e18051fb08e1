#include "attention/head_attention.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "platform/relax.hpp"
#include "platform/scratch.hpp"

namespace entropykv {
namespace {

constexpr float kBitsPerNat = 1.44269504f;
constexpr float kNatsPerBit = 0.69314718f;

void take_larger(float* total, const float* more, int n) {
    for (int j = 0; j < n; ++j) total[j] = std::max(total[j], more[j]);
}

}  // namespace

void Worker::serve(const PageLayout& layout, bool recalls) {
    const auto rows = static_cast<std::size_t>(kRowTile);
    grow(query_, rows * PageLayout::index(layout.k_stride));
    grow(output_, rows * PageLayout::index(layout.v_stride));
    grow(kernel_, prompt_scratch_floats(layout));
    grow(softmax_, 7 * rows);
    if (!recalls) return;
    grow(recall_, PageLayout::index(kMostQueryRows * (layout.k_stride + 1)));
    recall_positions_.resize(kMostQueryRows);
}

void Worker::keep(std::size_t n_floats) { grow(kept_, n_floats); }

void Worker::release() { std::vector<float>().swap(kept_); }

std::size_t Worker::bytes() const {
    return bytes_of(query_) + bytes_of(output_) + bytes_of(kernel_) + bytes_of(kept_) +
           bytes_of(softmax_) + bytes_of(recall_) + bytes_of(recall_positions_);
}

std::size_t bytes_of_workers(const Workers& workers) {
    std::size_t bytes = 0;
    for (const Worker& worker : workers) bytes += worker.bytes();
    return bytes;
}

void Observations::begin(const Room& room) {
    longest_ = room.longest;
    odd_layers_at_ = room.single ? room.rows * longest_ : 0;
    grow(observed_, odd_layers_at_ + room.rows * longest_);
    grow(logits_, room.logits * longest_);
}

void Observations::begin_carrying(int layer, std::size_t n_heads, bool observing_echo) {
    grow(carried_[index(layer)].observed, n_heads * longest_ * (observing_echo ? 2 : 1));
    grow(carried_[index(layer)].squares, n_heads);
}

void Observations::release() {
    for (std::vector<float>* values : {&logits_, &observed_}) std::vector<float>().swap(*values);
    for (Carried& carried : carried_) carried = Carried{};
}

float* Observations::sum(int layer, int first, int n_rows, int n) noexcept {
    float* total = row(layer, first);
    for (int number = 1; number < n_rows; ++number) add_up(total, row(layer, first + number), n);
    return total;
}

float* Observations::largest(int layer, int first, int n_rows, int n) noexcept {
    float* total = row(layer, first);
    for (int number = 1; number < n_rows; ++number)
        take_larger(total, row(layer, first + number), n);
    return total;
}

void Observations::add_up(float* total, const float* more, int n) const noexcept {
    if (measure_.by_largest()) {
        take_larger(total, more, n);
    } else {
        for (int j = 0; j < n; ++j) total[j] += more[j];
    }
}

float* Observations::carry(int layer, int head, bool is_first, const float* observed, float squares,
                           int n) noexcept {
    Carried& carried = carried_[index(layer)];
    float& so_far = carried.squares[index(head)];
    so_far = squares + (is_first ? 0.0f : so_far);
    if (observed == nullptr) return nullptr;
    float* total = carried.observed.data() + index(head) * longest_;
    if (is_first) {
        std::copy(observed, observed + n, total);
    } else {
        add_up(total, observed, n);
    }
    return total;
}

float* Observations::carry_largest(int layer, int number, bool is_first, const float* echo_shares,
                                   int n) noexcept {
    float* total = carried_[index(layer)].observed.data() + index(number) * longest_;
    if (is_first) {
        std::copy(echo_shares, echo_shares + n, total);
    } else {
        take_larger(total, echo_shares, n);
    }
    return total;
}

std::size_t Observations::bytes() const {
    std::size_t bytes = bytes_of(logits_) + bytes_of(observed_);
    for (const Carried& carried : carried_)
        bytes += bytes_of(carried.observed) + bytes_of(carried.squares);
    return bytes;
}

CommitQueue::CommitQueue(HeadStore& store, int n_threads) : store_(store), next_(index(n_threads)) {
    for (int layer = 0; layer < store.n_layers(); ++layer)
        for (int head = 0; head < store.shape(layer).n_head_kv; ++head) commits_.emplace_back();
}

void CommitQueue::begin(int n_text) noexcept {
    n_text_ = n_text;
    std::iota(next_.begin(), next_.end(), 0);
    before_ = so_far_ = due_ = 0;
    for (Commit& commit : commits_) commit.ready.store(false, std::memory_order_relaxed);
}

void CommitQueue::prepare(const LayerCommits& layer) noexcept {
    n_working_ = layer.n_threads;
    const int done = layer.recalls ? so_far_ : due_;
    before_ = so_far_;
    so_far_ += layer.n_heads;
    const bool waits = layer.n_heads > 0 && !layer.is_last;
    const int left_over = waits ? (so_far_ - done) % layer.n_threads : 0;
    due_ = std::max(before_, so_far_ - left_over);
}

void CommitQueue::add(int layer, int head, const float* observed, float squares) noexcept {
    Commit& commit = commits_[index(before_ + head)];
    commit.layer = layer;
    commit.head = head;
    commit.observed = observed;
    commit.squares = squares;
    commit.ready.store(true, std::memory_order_release);
}

void CommitQueue::run(int limit, int thread) noexcept {
    for (int& next = next_[index(thread)]; next < limit; next += n_working_) {
        const Commit& commit = commits_[index(next)];
        wait_for(commit.ready);
        store_.commit(commit.layer, commit.head, n_text_, commit.observed, nullptr, commit.squares,
                      thread);
    }
}

void HeadAttention::run(const Unit& unit, int upcoming) noexcept {
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
EntryRange HeadAttention::stored_entries(int unit) const noexcept {
    if (unit < 0) return {};
    const auto [tile, chunk] = call_.unit(unit);
    const int size = split_.chunk_entries(call_.total(tile.head));
    const int last = std::min(call_.head(tile.head).count(), (chunk + 1) * size);
    if (chunk * size >= last) return {};
    return {&call_.layout(), call_.head(tile.head).pages.all().data(), chunk * size, last};
}

void HeadAttention::start_softmax(const RowTile& tile, int chunk,
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

// Returns the logit of the model's attention sink for a row of queries, less what the logits of
// stored keys lack because keys are stored without their centre. Rows behind those of the tile only
// fill up a vector, so their logits do not matter.
float HeadAttention::sink_of(const RowTile& tile, int r) const noexcept {
    const int of_group = (tile.first + r) % split_.group;
    const float sink = call_.params.sinks[tile.head * split_.group + of_group];
    if (r >= tile.count) return sink;
    return sink - call_.missing_logit(tile.head, (tile.first + r) / split_.group, of_group);
}

SoftmaxState HeadAttention::partial(const RowTile& tile, int chunk) noexcept {
    const int chunks = split_.chunks(call_.total(tile.head));
    const std::size_t rows = index(split_.tile_rows);
    const std::size_t size = rows * index(call_.layout().v_stride + 3);
    const int slot = call_.units.first_unit(tile.head) + tile.number * chunks + chunk;
    float* start = call_.partials + index(slot) * size;
    return {start, start + rows, start + 2 * rows, start + 3 * rows};
}

void HeadAttention::load_queries(const RowTile& tile) noexcept {
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
void HeadAttention::over_ranges(const RowTile& tile, int first, int last, Visit visit) noexcept {
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

PromptTask HeadAttention::prompt_task(const RowTile& tile, const SoftmaxState& state) noexcept {
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

void HeadAttention::attend_rows(const RowTile& tile, int chunk) noexcept {
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

void HeadAttention::attend_token(const RowTile& tile, int chunk, int upcoming) noexcept {
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

SoftmaxState HeadAttention::merge_tile(const RowTile& tile) noexcept {
    const int chunks = split_.chunks(call_.total(tile.head));
    for (int r = 0; chunks > 1 && r < tile.count; ++r) merge_row(tile, chunks, r);
    return partial(tile, 0);
}

void HeadAttention::merge_row(const RowTile& tile, int chunks, int r) noexcept {
    const int stride = call_.layout().v_stride;
    const SoftmaxState all = partial(tile, 0);
    const float nats = split_.by_rows ? kNatsPerBit : 1.0f;
    float max = all.max[r];
    for (int chunk = 1; chunk < chunks; ++chunk) max = std::max(max, partial(tile, chunk).max[r]);
    float sum = 0.0f;
    float weighted = 0.0f;
    float* output = all.output + index(r) * index(stride);
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const SoftmaxState part = partial(tile, chunk);
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

void HeadAttention::write_output(const RowTile& tile, const SoftmaxState& state) noexcept {
    const PageLayout& layout = call_.layout();
    const int n_head = call_.shape().n_head;
    for (int r = 0; r < tile.count; ++r) {
        const int row = tile.first + r;
        const int query_head = tile.head * split_.group + row % split_.group;
        const int output_row = row / split_.group * n_head + query_head;
        float* output = call_.output + index(output_row) * index(layout.v_dim);
        float* source = state.output + index(r) * index(layout.v_stride);
        if (layout.rotated) call_.kernels.rotate(source, layout.v_stride);
        const float scale = 1.0f / state.sum[r];
        for (int d = 0; d < layout.v_dim; ++d) output[d] = source[d] * scale;
    }
}

// Returns 1 for every row of a tile from `first` to `end` of the micro-batch, and 0 for the others.
const float* HeadAttention::weights_of(const RowTile& tile, int first, int end) noexcept {
    float* weights = worker_.weights();
    for (int r = 0; r < kRowTile; ++r) {
        const int row = tile.first + r;
        weights[r] = r < tile.count && row >= first && row < end ? 1.0f : 0.0f;
    }
    return weights;
}

void HeadAttention::observe(const RowTile& tile, const SoftmaxState& state) noexcept {
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
        // Rows before the observation window do not count, nor those of an echo that only raises
        // predicted shares.
        float* observed = begin(call_.observed(tile.head, band));
        if (tile.first < step_.end_of_counted_rows(split_))
            add_observed(tile, state, step_.importance.measure().statistic,
                         weights_of(tile, step_.first_observed_row(split_),
                                    step_.end_of_counted_rows(split_)),
                         observed);
    }
    if (step_.observing_echo) {
        float* echo_shares = begin(call_.echo_shares(tile.head, band));
        if (tile.first + tile.count > step_.first_echo_row(split_))
            add_observed(tile, state, Statistic::largest_probability,
                         weights_of(tile, step_.first_echo_row(split_), tile.first + tile.count),
                         echo_shares);
    }
}

void HeadAttention::add_observed(const RowTile& tile, const SoftmaxState& state, Statistic what,
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

void HeadAttention::observe_decode(const RowTile& tile, const SoftmaxState& state) noexcept {
    if (!step_.observing) return;
    const int total = call_.total(tile.head);
    const Statistic what = step_.importance.measure().statistic;
    float* observed = call_.observed(tile.head, 0);
    std::fill(observed, observed + total, 0.0f);
    for (int r = 0; r < tile.count; ++r)
        call_.kernels.logits_observe(call_.observations.logits(tile.head * split_.group + r), total,
                                     what, state.max[r], state.sum[r], observed);
}

void HeadAttention::merge(int head) noexcept {
    for (int number = 0; split_.by_entries && number < split_.tiles; ++number) {
        const RowTile tile = split_.tile(head, number);
        const SoftmaxState state = merge_tile(tile);
        write_output(tile, state);
        call_.entropies.note(call_.layer, split_, tile, state);
        if (split_.by_rows) {
            load_queries(tile);
            observe(tile, state);
        } else {
            observe_decode(tile, state);
        }
    }
    call_.entropies.add_head(call_.layer, split_, head);
}

void HeadAttention::merge_and_commit(int head) noexcept {
    merge(head);
    if (call_.reader + 1 < call_.shape().readers) {
        carry(head);
        carry_echo_shares(head);
    } else if (queues(step_, call_.shape(), call_.shared_choice)) {
        call_.commits.add(call_.layer, head, call_.sum_observed(head), output_squares(head));
    } else if (!call_.shared_choice) {
        commit(head, carry(head), carry_echo_shares(head));
    } else if (call_.units.ends_layer()) {
        commit_layer();
    }
}

// Returns the sum of the squared norms of a head's outputs over the query heads of its group and
// all queries of the text, or those of the echo if there is no text; 0 if losses are not measured.
float HeadAttention::output_squares(int head) const noexcept {
    if (!call_.store.components().common.measures_losses()) return 0.0f;
    const LayerShape& shape = call_.shape();
    const std::size_t size = index(split_.group * shape.v_dim);
    const int n_tokens = step_.n_text > 0 ? step_.n_text : step_.n_tokens;
    double sum = 0.0;
    for (int token = 0; token < n_tokens; ++token) {
        const float* output =
            call_.output + index(token * shape.n_head * shape.v_dim) + index(head) * size;
        float of_token = 0.0f;
        for (std::size_t d = 0; d < size; ++d) of_token += output[d] * output[d];
        sum += of_token;
    }
    return static_cast<float>(sum);
}

// Returns what the readers of the layer, up to this one, observed of a head; null if nothing is
// observed.
float* HeadAttention::carry(int head) noexcept {
    float* observed = call_.sum_observed(head);
    if (call_.shape().readers == 1) return observed;
    return call_.observations.carry(call_.layer, head, call_.reader == 0, observed,
                                    output_squares(head), call_.total(head));
}

// Returns the largest shares that queries of an echo gave to the entries of a head, over the
// readers of the layer up to this one; null if no echo is observed.
float* HeadAttention::carry_echo_shares(int head) noexcept {
    float* echo_shares = call_.max_echo_shares(head);
    const LayerShape& shape = call_.shape();
    if (shape.readers == 1 || echo_shares == nullptr) return echo_shares;
    return call_.observations.carry_largest(call_.layer, shape.n_head_kv + head, call_.reader == 0,
                                            echo_shares, call_.total(head));
}

void HeadAttention::commit(int head, const float* observed, const float* echo_shares) noexcept {
    const float squares = call_.shape().readers > 1
                              ? call_.observations.carried_squares(call_.layer, head)
                              : output_squares(head);
    call_.store.commit(call_.layer, head, step_.n_text, observed, echo_shares, squares,
                       call_.thread);
}

// Commits every head of the layer by the sum of what all its heads observed. With a shared choice,
// entry i of every head has the same position, so sums by entry make sense.
void HeadAttention::commit_layer() noexcept {
    const int n_heads = call_.shape().n_head_kv;
    const int n = call_.total(0);
    float* shared = carry(0);
    for (int head = 1; shared != nullptr && head < n_heads; ++head)
        call_.observations.add_up(shared, carry(head), n);
    // No measure with predicted scores has a shared choice, so no echo was observed.
    for (int head = 0; head < n_heads; ++head) commit(head, shared, nullptr);
}

}  // namespace entropykv
