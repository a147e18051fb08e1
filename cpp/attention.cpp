#include "attention.hpp"

#include <algorithm>
#include <cmath>

namespace entropykv {
namespace {

constexpr int kWideGroup = 12;  // from so many query heads on, rows in lanes pay for decode too
constexpr int kFewUnits = 8;    // fewer tiles than that are split by entries
constexpr float kBitsPerNat = 1.44269504f;

std::size_t index(int i) { return static_cast<std::size_t>(i); }

void grow(std::vector<float>& values, std::size_t size) {
    if (values.size() < size) values.resize(size);
}

}  // namespace

std::vector<const KernelTable*> available_kernels() {
    std::vector<const KernelTable*> tables{&kKernelsPortable};
#if defined(ENTROPYKV_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        tables.push_back(&kKernelsAvx2);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            tables.push_back(&kKernelsAvx512);
    }
#endif
    return tables;
}

std::size_t prompt_scratch_floats(const PageLayout& layout) {
    return index(kEntryTile) * index(layout.k_stride + layout.v_stride + kRowTile) +
           index(kEntryTile) * index(std::max(layout.k_blocks, layout.v_blocks)) +
           2 * index(kRowTile);
}

Attention::Attention(HeadStore& store, const KernelTable& kernels, int n_threads)
    : store_(store), kernels_(kernels), workers_(index(std::max(n_threads, 1))) {
    store_.set_workers(n_threads);
    int most_heads = 0;
    for (int l = 0; l < store_.n_layers(); ++l) {
        const PageLayout& layout = store_.layout(l);
        most_heads = std::max(most_heads, store_.shape(l).n_head_kv);
        entropy_.push_back({std::vector<double>(index(store_.shape(l).n_head), 0.0), 0});
        for (Worker& worker : workers_) {
            grow(worker.query, index(kRowTile) * index(layout.k_stride));
            grow(worker.output, index(kRowTile) * index(layout.v_stride));
            grow(worker.kernel, prompt_scratch_floats(layout));
            grow(worker.softmax, index(4 * kRowTile));
        }
    }
    first_unit_.resize(index(most_heads + 1));
    first_partial_.resize(index(most_heads));
    unfinished_units_ = std::make_unique<std::atomic<int>[]>(index(most_heads));
}

const std::vector<double>& Attention::entropy_sums(int layer) const {
    return entropy_.at(index(layer)).sums;
}

std::int64_t Attention::entropy_rows(int layer) const { return entropy_.at(index(layer)).rows; }

void Attention::reset_entropy() {
    for (LayerEntropy& layer : entropy_) {
        std::fill(layer.sums.begin(), layer.sums.end(), 0.0);
        layer.rows = 0;
    }
}

// ------------------------------------------------------------------------------------------------
// the split

Attention::Split Attention::split_of(int layer) const {
    const LayerShape& shape = store_.shape(layer);
    Split split{};
    split.group = shape.n_head / shape.n_head_kv;
    split.rows = n_tokens_ * split.group;
    split.by_rows = n_tokens_ > 1 || split.group >= kWideGroup;
    split.tile_rows = split.by_rows ? kRowTile : split.rows;
    split.tiles = (split.rows + split.tile_rows - 1) / split.tile_rows;
    split.by_entries = !split.by_rows || split.tiles * shape.n_head_kv < kFewUnits;
    return split;
}

int Attention::chunk_entries(const Split& split, int total) {
    return split.by_rows || total > 1024 ? 256 : 64;
}

int Attention::chunks_of(const Split& split, int total) {
    if (!split.by_entries) return 1;
    const int chunk = chunk_entries(split, total);
    return (total + chunk - 1) / chunk;
}

int Attention::first_observed_row(const Split& split) const {
    return std::max(0, n_tokens_ - observation_window_) * split.group;
}

Attention::Tile Attention::tile_at(const Split& split, int head, int number) {
    const int first = number * split.tile_rows;
    return {head, number, first, std::min(split.tile_rows, split.rows - first)};
}

void Attention::begin(int n_tokens, std::int32_t base_position) {
    store_.reserve(n_tokens);
    n_tokens_ = n_tokens;
    base_position_ = base_position;
    longest_ = 0;
    for (int l = 0; l < store_.n_layers(); ++l)
        for (int h = 0; h < store_.shape(l).n_head_kv; ++h)
            longest_ = std::max(longest_, index(total_entries(l, h)));
    const bool scored = store_.settings().score == ScoreKind::mass;
    for (int l = 0; l < store_.n_layers(); ++l) {
        const Split split = split_of(l);
        const std::size_t n_heads = index(store_.shape(l).n_head_kv);
        std::size_t slots = 0;
        for (int h = 0; split.by_entries && h < store_.shape(l).n_head_kv; ++h)
            slots += index(split.tiles * chunks_of(split, total_entries(l, h)));
        grow(partials_, slots * index(split.tile_rows) * index(store_.layout(l).v_stride + 3));
        if (track_entropy_) grow(row_entropy_, n_heads * index(split.rows));
        if (!scored) continue;
        const int observed = split.tiles - first_observed_row(split) / split.tile_rows;
        grow(mass_, n_heads * index(observed) * longest_);
        if (!split.by_rows) grow(logits_, n_heads * index(split.group) * longest_);
    }
}

void Attention::prepare(int layer) noexcept {
    const Split split = split_of(layer);
    int units = 0;
    for (int h = 0; h < store_.shape(layer).n_head_kv; ++h) {
        const int of_head = split.tiles * chunks_of(split, total_entries(layer, h));
        first_unit_[index(h)] = units;
        first_partial_[index(h)] = units;
        unfinished_units_[index(h)].store(of_head, std::memory_order_relaxed);
        units += of_head;
    }
    first_unit_[index(store_.shape(layer).n_head_kv)] = units;
    next_unit_.store(0, std::memory_order_relaxed);
}

// ------------------------------------------------------------------------------------------------
// the graph's nodes

void Attention::stage_k(int layer, const RowsView& k, int thread, int n_threads) noexcept {
    if (thread == 0) prepare(layer);
    const PageLayout& layout = store_.layout(layer);
    const int n_heads = store_.shape(layer).n_head_kv;
    for (int i = thread; i < n_tokens_ * n_heads; i += n_threads) {
        const int token = i / n_heads;
        std::byte* page = store_.staging(i % n_heads)[token / layout.entries];
        const int slot = token % layout.entries;
        kernels_.store_k(layout, page, slot, k.row(token, i % n_heads));
        layout.positions(page)[slot] = base_position_ + token;
        layout.importance(page)[slot] = 0.0f;
    }
}

void Attention::stage_v(int layer, const RowsView& v, int thread, int n_threads) noexcept {
    const PageLayout& layout = store_.layout(layer);
    const int n_heads = store_.shape(layer).n_head_kv;
    for (int i = thread; i < n_tokens_ * n_heads; i += n_threads) {
        const int token = i / n_heads;
        kernels_.store_v(layout, store_.staging(i % n_heads)[token / layout.entries],
                         token % layout.entries, v.row(token, i % n_heads));
    }
}

void Attention::attend(int layer, const AttentionParams& params, const RowsView& query,
                       float* output, int thread) noexcept {
    const Call call{layer, split_of(layer), &params, &query, output, thread};
    const int n_units = first_unit_[index(store_.shape(layer).n_head_kv)];
    while (true) {
        const int unit = next_unit_.fetch_add(1, std::memory_order_relaxed);
        if (unit >= n_units) return;
        run_unit(call, unit);
    }
}

// ------------------------------------------------------------------------------------------------
// one unit

void Attention::run_unit(const Call& call, int unit) noexcept {
    int head = 0;
    while (unit >= first_unit_[index(head + 1)]) ++head;
    const int chunks = chunks_of(call.split, total_entries(call.layer, head));
    const int local = unit - first_unit_[index(head)];
    const Tile tile = tile_at(call.split, head, local / chunks);
    if (call.split.by_rows) {
        run_rows(call, tile, local % chunks);
    } else {
        run_decode(call, tile, local % chunks);
    }
    if (unfinished_units_[index(head)].fetch_sub(1, std::memory_order_acq_rel) == 1)
        finish_head(call, head);
}

void Attention::start_softmax(const Call& call, const Tile& tile, int chunk,
                              const SoftmaxState& state) const noexcept {
    const bool sinks = call.params->sinks != nullptr && chunk == 0;
    for (int r = 0; r < tile.count; ++r) {
        const int query_head = tile.head * call.split.group + (tile.first + r) % call.split.group;
        state.max[r] = sinks ? call.params->sinks[query_head] : kMaskedLogit;
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
    const int slot = first_partial_[index(tile.head)] + tile.number * chunks + chunk;
    float* start = partials_.data() + index(slot) * size;
    return {start, start + rows, start + 2 * rows, start + 3 * rows};
}

void Attention::load_queries(const Call& call, const Tile& tile) noexcept {
    const PageLayout& layout = store_.layout(call.layer);
    Worker& worker = workers_[index(call.thread)];
    float* query = worker.query.data();
    float* positions = worker.softmax.data() + 3 * kRowTile;
    const std::size_t lanes = call.split.by_rows ? kRowTile : 1;
    const std::size_t stride = call.split.by_rows ? 1 : index(layout.k_stride);
    std::fill(query, query + index(call.split.tile_rows) * index(layout.k_stride), 0.0f);
    for (int r = 0; r < tile.count; ++r) {
        const int row = tile.first + r;
        const int token = row / call.split.group;
        const float* source =
            call.query->row(token, tile.head * call.split.group + row % call.split.group);
        for (int d = 0; d < layout.k_dim; ++d)
            query[index(d) * lanes + index(r) * stride] = source[d] * call.params->scale;
        positions[r] = static_cast<float>(base_position_ + token);
    }
}

// Visits the ranges of entries [first, last) (stored ones first, then staged ones) that rows of
// the tile see, with whether some row does not see all of the range.
template <typename Visit>
void Attention::over_ranges(const Call& call, const Tile& tile, int first, int last,
                            Visit visit) noexcept {
    const PageLayout& layout = store_.layout(call.layer);
    const int count = store_.count(call.layer, tile.head);
    const bool windowed = call.params->window > 0;
    const auto part = [&](const std::byte* const* pages, int offset, int from, int to,
                          bool masked) {
        from = std::max(from, first - offset);
        to = std::min(to, last - offset);
        if (from < to) visit(EntryRange{&layout, pages, from, to}, offset + from, masked);
    };
    part(store_.pages(call.layer, tile.head), 0, 0, count, windowed);
    const int first_token = tile.first / call.split.group;
    const int last_token = (tile.first + tile.count - 1) / call.split.group;
    std::byte* const* staged = store_.staging(tile.head);
    part(staged, count, 0, first_token + 1, windowed);
    part(staged, count, first_token + 1, last_token + 1, true);
}

PromptTask Attention::prompt_task(const Call& call, const Tile& tile,
                                  const SoftmaxState& state) noexcept {
    Worker& worker = workers_[index(call.thread)];
    PromptTask task{};
    task.query = worker.query.data();
    task.row_positions = worker.softmax.data() + 3 * kRowTile;
    task.rows = tile.count;
    task.softcap = call.params->softcap;
    task.window = static_cast<float>(call.params->window);
    task.scratch = worker.kernel.data();
    task.state = state;
    return task;
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
    over_ranges(call, tile, chunk * size, std::min(total, (chunk + 1) * size),
                [&](const EntryRange& range, int, bool masked) {
                    task.entries = range;
                    task.masked = masked;
                    kernels_.prompt(task);
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

void Attention::run_decode(const Call& call, const Tile& tile, int chunk) noexcept {
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
    const int window = call.params->window;
    task.oldest_position =
        window > 0 ? static_cast<float>(base_position_ - window + 1) : kMaskedLogit;
    task.state = state;
    task.logits_stride = longest_;
    const bool scored = store_.settings().score == ScoreKind::mass;
    over_ranges(call, tile, chunk * size, std::min(total, (chunk + 1) * size),
                [&](const EntryRange& range, int offset, bool) {
                    task.entries = range;
                    task.logits = scored ? logits_of(call, tile.head) + offset : nullptr;
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
        for (int row = 0; row < call.split.rows; ++row)
            entropy.sums[index(head * call.split.group + row % call.split.group)] +=
                row_entropy_[index(head * call.split.rows + row)];
        if (head == 0) entropy.rows += n_tokens_;
    }
    store_.commit(call.layer, head, n_tokens_, sum_mass(call, head), call.thread);
}

// Merges the partial softmaxes of a tile into its first chunk's.
SoftmaxState Attention::merge(const Call& call, const Tile& tile) noexcept {
    const int chunks = chunks_of(call.split, total_entries(call.layer, tile.head));
    const std::size_t stride = index(store_.layout(call.layer).v_stride);
    const SoftmaxState all = partial_state(call, tile, 0);
    for (int chunk = 1; chunk < chunks; ++chunk) {
        const SoftmaxState part = partial_state(call, tile, chunk);
        for (int r = 0; r < tile.count; ++r) {
            if (part.sum[r] == 0.0f) continue;
            const float max = std::max(all.max[r], part.max[r]);
            const float before = std::max(all.max[r] - max, -200.0f);
            const float after = std::max(part.max[r] - max, -200.0f);
            const float old_factor = std::exp(before);
            const float new_factor = std::exp(after);
            all.weighted[r] = old_factor * (all.weighted[r] + all.sum[r] * before) +
                              new_factor * (part.weighted[r] + part.sum[r] * after);
            all.sum[r] = old_factor * all.sum[r] + new_factor * part.sum[r];
            all.max[r] = max;
            float* output = all.output + index(r) * stride;
            const float* more = part.output + index(r) * stride;
            for (std::size_t d = 0; d < stride; ++d)
                output[d] = old_factor * output[d] + new_factor * more[d];
        }
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
    for (int r = 0; r < tile.count; ++r) {
        const float nats = std::log(state.sum[r]) - state.weighted[r] / state.sum[r];
        row_entropy_[index(tile.head * call.split.rows + tile.first + r)] =
            std::max(nats, 0.0f) * kBitsPerNat;
    }
}

float* Attention::logits_of(const Call& call, int head) noexcept {
    return logits_.data() + index(head * call.split.group) * longest_;
}

float* Attention::mass_of(const Call& call, const Tile& tile) noexcept {
    const int first = first_observed_row(call.split) / call.split.tile_rows;
    const int observed = call.split.tiles - first;
    return mass_.data() + index(tile.head * observed + tile.number - first) * longest_;
}

void Attention::observe(const Call& call, const Tile& tile, const SoftmaxState& state) noexcept {
    const int first_row = first_observed_row(call.split) - tile.first;
    if (store_.settings().score != ScoreKind::mass || first_row >= tile.count) return;
    const int total = total_entries(call.layer, tile.head);
    float* mass = mass_of(call, tile);
    std::fill(mass, mass + total, 0.0f);
    PromptTask task = prompt_task(call, tile, state);
    over_ranges(call, tile, 0, total, [&](const EntryRange& range, int offset, bool masked) {
        task.entries = range;
        task.masked = masked;
        kernels_.prompt_mass(task, first_row, mass + offset);
    });
}

void Attention::observe_decode(const Call& call, const Tile& tile,
                               const SoftmaxState& state) noexcept {
    if (store_.settings().score != ScoreKind::mass) return;
    const int total = total_entries(call.layer, tile.head);
    float* mass = mass_of(call, tile);
    std::fill(mass, mass + total, 0.0f);
    for (int r = 0; r < tile.count; ++r)
        kernels_.logits_mass(logits_of(call, tile.head) + index(r) * longest_, total, state.max[r],
                             state.sum[r], mass);
}

// The mass that the observation window gave to every entry of a head, or null.
const float* Attention::sum_mass(const Call& call, int head) noexcept {
    if (store_.settings().score != ScoreKind::mass) return nullptr;
    const int first = first_observed_row(call.split) / call.split.tile_rows;
    float* total = mass_of(call, tile_at(call.split, head, first));
    const int n = total_entries(call.layer, head);
    for (int number = first + 1; number < call.split.tiles; ++number) {
        const float* more = mass_of(call, tile_at(call.split, head, number));
        for (int j = 0; j < n; ++j) total[j] += more[j];
    }
    return total;
}

}  // namespace entropykv
