#include "attention/attention.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "platform/instruction_sets.hpp"
#include "platform/relax.hpp"
#include "platform/scratch.hpp"

namespace entropykv {
namespace {

constexpr int kWideGroup = 12;  // from so many query heads on, rows in lanes pay for decode too
constexpr int kFewUnits = 8;    // fewer tiles than that are split by entries
// What is observed is held once for every band of tiles: so many bands of a layer's heads are
// enough for the threads, and few enough not to need as much memory as the cache.
constexpr int kMostBands = 64;
constexpr int kRowsChunk = 256;      // entries of a unit of the prompt kernel, or more
constexpr int kMostRowsChunks = 64;  // units of such a tile
constexpr int kMostKept = 8192;      // of more entries, weights are computed again to be observed

void grow(std::vector<float>& values, std::size_t size) {
    if (values.size() < size) values.resize(size);
}

}  // namespace

std::vector<const KernelTable*> available_kernels() {
    std::vector<const KernelTable*> tables{&kKernelsPortable};
#if defined(ENTROPYKV_X86)
    if (has_avx2()) tables.push_back(&kKernelsAvx2);
    if (has_avx512()) tables.push_back(&kKernelsAvx512);
    if (has_avx512_vnni()) tables.push_back(&kKernelsAvx512Vnni);
#elif defined(ENTROPYKV_ARM64)
    tables.push_back(&kKernelsNeon);
#endif
    return tables;
}

std::vector<float> alibi_slopes(int n_head, float max_bias) {
    int power = 1;  // the largest one that is not above n_head
    while (2 * power <= n_head) power *= 2;
    const auto base = [&](float bias) { return std::pow(2.0f, -bias / static_cast<float>(power)); };
    std::vector<float> slopes(static_cast<std::size_t>(n_head));
    for (int head = 0; head < n_head; ++head)
        slopes[static_cast<std::size_t>(head)] =
            head < power
                ? std::pow(base(max_bias), static_cast<float>(head + 1))
                : std::pow(base(max_bias / 2.0f), static_cast<float>(2 * (head - power) + 1));
    return slopes;
}

std::size_t prompt_scratch_floats(const PageLayout& layout) {
    const int entries = kEntryTile + kGroupEntries;  // a tile starts anywhere in a group
    const int values = layout.k_stride + layout.v_stride;
    const int rows = entries / 2 + 6;  // pairs of weights, and values of a row
    return static_cast<std::size_t>(entries * (values + 1) + rows * kRowTile + kKeptFloats);
}

Attention::Job::Job(int n_heads)
    : first_unit(index(n_heads + 1)),
      unfinished_units(std::make_unique<std::atomic<int>[]>(index(n_heads))),
      next_unit(std::make_unique<std::atomic<int>[]>(index(n_heads))) {}

Attention::Attention(HeadStore& store, const KernelTable& kernels, int n_threads,
                     std::shared_ptr<Workers> workers)
    : store_(store),
      kernels_(kernels),
      shared_workers_(workers != nullptr ? workers : std::make_shared<Workers>()),
      workers_(*shared_workers_),
      owns_workers_(workers == nullptr),
      n_threads_(std::max(n_threads, 1)) {
    if (workers_.size() < index(n_threads_)) workers_.resize(index(n_threads_));
    store_.set_workers(n_threads, kernels);
    for (int l = 0; l < store_.n_layers(); ++l) {
        const PageLayout& layout = store_.layout(l);
        first_job_.push_back(jobs_.size());
        for (int r = 0; r < store_.shape(l).readers; ++r)
            jobs_.emplace_back(store_.shape(l).n_head_kv);
        for (int h = 0; h < store_.shape(l).n_head_kv; ++h) commits_.emplace_back();
        entropy_.push_back({std::vector<double>(index(store_.shape(l).n_head), 0.0), 0, {}});
        for (Worker& worker : workers_) {
            grow(worker.query, index(kRowTile) * index(layout.k_stride));
            grow(worker.output, index(kRowTile) * index(layout.v_stride));
            grow(worker.kernel, prompt_scratch_floats(layout));
            grow(worker.softmax, index(7 * kRowTile));
            if (!store_.freezes()) continue;
            grow(worker.recall, index(kMostQueryRows * (layout.k_stride + 1)));
            worker.recall_positions.resize(kMostQueryRows);
        }
    }
    next_commit_.resize(index(n_threads_));
    captures_.resize(index(store_.n_layers()));
    carried_.resize(index(store_.n_layers()));
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

std::vector<float> Attention::row_entropies(int layer) const {
    const Split split = split_of(layer);
    const std::vector<float>& last = entropy_.at(index(layer)).last;
    const int n_head = store_.shape(layer).n_head;
    std::vector<float> rows(index(n_text_ * n_head), 0.0f);
    if (last.size() < rows.size()) return {};
    for (int token = 0; token < n_text_; ++token)
        for (int head = 0; head < n_head; ++head)
            rows[index(token * n_head + head)] = last[index(
                head / split.group * split.rows + token * split.group + head % split.group)];
    return rows;
}

void Attention::capture_queries(const Call& call) noexcept {
    const LayerShape& shape = store_.shape(call.layer);
    Capture& capture = captures_[index(call.layer)];
    float* out = capture.queries.data();
    for (int token = 0; token < n_tokens_; ++token)
        for (int head = 0; head < shape.n_head; ++head)
            for (int d = 0; d < shape.k_dim; ++d)
                *out++ = call.query->row(token, head)[d] * call.params->scale;
    const float* sinks = call.params->sinks;
    for (std::size_t head = 0; head < capture.sinks.size(); ++head)
        capture.sinks[head] = sinks != nullptr ? sinks[head] : kMaskedLogit;
    const float* slopes = call.params->slopes;
    for (std::size_t head = 0; head < capture.slopes.size(); ++head)
        capture.slopes[head] = slopes != nullptr ? slopes[head] : 0.0f;
    capture.softcap = call.params->softcap;
}

// ------------------------------------------------------------------------------------------------
// the split

Attention::Split Attention::split_of(int layer) const {
    const LayerShape& shape = store_.shape(layer);
    Split split{};
    split.group = shape.n_head / shape.n_head_kv;
    split.rows = n_tokens_ * split.group;
    // The decode kernel reads V as it lies in pages of its own.
    split.by_rows = n_tokens_ > 1 || split.group >= kWideGroup || shape.latent;
    split.tile_rows = split.by_rows ? kRowTile : split.rows;
    split.tiles = (split.rows + split.tile_rows - 1) / split.tile_rows;
    split.by_entries = !split.by_rows || split.tiles * shape.n_head_kv < kFewUnits;
    const int most_bands = std::max(1, kMostBands / shape.n_head_kv);
    split.band_tiles = split.by_entries ? split.tiles : (split.tiles + most_bands - 1) / most_bands;
    return split;
}

int Attention::chunk_entries(const Split& split, int total) {
    // A unit costs as much as some twenty entries, and a few units per thread share out evenly.
    // What the prompt kernel leaves of a unit is as large as a tile of outputs: there are only so
    // many.
    if (split.by_rows) return std::max(kRowsChunk, (total / kMostRowsChunks + 63) / 64 * 64);
    return total <= 1024 ? 128 : total <= 8192 ? 256 : total <= 65536 ? 512 : 1024;
}

int Attention::chunks_of(const Split& split, int total) {
    if (!split.by_entries) return 1;
    const int chunk = chunk_entries(split, total);
    return (total + chunk - 1) / chunk;
}

// Of so many entries or fewer: where units grow, there may be fewer of them.
int Attention::most_chunks(const Split& split, int most) {
    if (split.by_entries && split.by_rows)
        return std::min(kMostRowsChunks, (most + kRowsChunk - 1) / kRowsChunk);
    int chunks = chunks_of(split, most);
    for (const int total : {1024, 8192, 65536})
        if (total < most) chunks = std::max(chunks, chunks_of(split, total));
    return chunks;
}

int Attention::first_observed_row(const Split& split) const {
    // All queries of an echo count; to reconstruct, no others do where there are some.
    const ImportanceSettings& importance = store_.settings().importance;
    const bool echo_alone = importance.kind == ScoreKind::reconstruct && n_text_ < n_tokens_;
    const int first = echo_alone ? n_text_ : n_text_ - importance.observation_window;
    return std::max(0, first) * split.group;
}

// Bands with rows of the observation window.
int Attention::observed_bands(const Split& split) const {
    return (split.tiles - 1) / split.band_tiles - first_observed_tile(split) / split.band_tiles + 1;
}

// Whether the weights of a tile stay until they are observed.
bool Attention::keeps_weights(const Split& split, int total) const noexcept {
    return observing_ && split.by_rows && !split.by_entries && total <= kMostKept &&
           store_.settings().importance.kind != ScoreKind::products;
}

// Of a tile that sees so many entries or fewer.
std::size_t Attention::most_kept_floats(const Split& split, int most) const noexcept {
    const int total = std::min(most, kMostKept);
    if (!keeps_weights(split, total)) return 0;
    return index(total / kEntryTile + 3) * index(kKeptFloats);  // over_ranges() visits three
}

// Units of a head of so many entries.
int Attention::units_of(const Split& split, int total) const {
    if (split.by_entries) return split.tiles * chunks_of(split, total);
    return (split.tiles + split.band_tiles - 1) / split.band_tiles;
}

Attention::Tile Attention::tile_at(const Split& split, int head, int number) {
    const int first = number * split.tile_rows;
    return {head, number, first, std::min(split.tile_rows, split.rows - first)};
}

void Attention::begin(int n_text, std::int32_t base_position, std::int32_t rope_position,
                      int n_echo) {
    if (n_text < 0 || n_echo < 0 || n_text + n_echo < 1 ||
        n_text > store_.settings().max_tokens - n_echo)
        throw std::invalid_argument("a micro-batch outside of 1 .. max_tokens");
    const int n_tokens = n_text + n_echo;
    if (base_position < 0 || base_position > kMostPositions - n_tokens)
        throw std::invalid_argument("a position outside of 0 .. 2^30");
    const int interval = store_.recall_interval();
    recalling_ = interval > 0 && n_text > 0 && store_.frozen() > 0 &&
                 (n_tokens > 1 || recall_now_ || base_position % interval == 0);
    store_.reserve(n_text, base_position + n_text - 1, recalling_, n_echo);
    recall_now_ = false;
    store_.prepare_queries(rope_position, n_text);
    n_tokens_ = n_tokens;
    n_text_ = n_text;
    base_position_ = base_position;
    observing_ = store_.settings().importance.observes() &&
                 (n_tokens > 1 || base_position % store_.scoring_interval() == 0);
    std::iota(next_commit_.begin(), next_commit_.end(), 0);
    commits_before_ = commits_so_far_ = commits_due_ = 0;
    for (Commit& commit : commits_) commit.ready.store(false, std::memory_order_relaxed);
    // Recall adds only what the budget has room for.
    const auto most_entries = [&](int layer, int head) {
        const int total = total_entries(layer, head);
        const int recalled = recalling_ ? store_.most_recalled(layer, head) : 0;
        return std::max(total, std::min(total + recalled, store_.budget(layer, head) + n_echo));
    };
    longest_ = 0;
    for (int l = 0; l < store_.n_layers(); ++l)
        for (int h = 0; h < store_.shape(l).n_head_kv; ++h)
            longest_ = std::max(longest_, index(most_entries(l, h)));
    std::size_t observed = 0;  // of a layer
    std::size_t kept = 0;      // of a tile
    for (int l = 0; l < store_.n_layers(); ++l) {
        const Split split = split_of(l);
        const std::size_t n_heads = index(store_.shape(l).n_head_kv);
        std::size_t slots = 0;
        for (int h = 0; split.by_entries && h < store_.shape(l).n_head_kv; ++h)
            slots += index(split.tiles * most_chunks(split, most_entries(l, h)));
        grow(partials_, slots * index(split.tile_rows) * index(store_.layout(l).v_stride + 3));
        if (track_entropy_) grow(entropy_[index(l)].last, n_heads * index(split.rows));
        if (capture_queries_) {
            const LayerShape& shape = store_.shape(l);
            captures_[index(l)].queries.resize(index(n_tokens * shape.n_head * shape.k_dim));
            captures_[index(l)].sinks.resize(index(shape.n_head));
            captures_[index(l)].slopes.resize(index(shape.n_head));
        }
        if (store_.shape(l).readers > 1) {
            grow(carried_[index(l)].observed, n_heads * longest_);
            grow(carried_[index(l)].squares, n_heads);
        }
        if (!observing_) continue;
        for (int h = 0; h < store_.shape(l).n_head_kv; ++h)
            kept = std::max(kept, most_kept_floats(split, most_entries(l, h)));
        observed = std::max(observed, n_heads * index(observed_bands(split)) * longest_);
        if (!split.by_rows) grow(logits_, n_heads * index(split.group) * longest_);
    }
    observed_turn_ = n_tokens == 1 ? observed : 0;
    grow(observed_, observed_turn_ + observed);
    for (Worker& worker : workers_) grow(worker.kept, kept);
}

std::size_t Attention::scratch_bytes() const {
    std::size_t bytes = bytes_of(partials_) + bytes_of(logits_) + bytes_of(observed_);
    if (owns_workers_) bytes += bytes_of_workers(workers_);
    for (const Carried& carried : carried_)
        bytes += bytes_of(carried.observed) + bytes_of(carried.squares);
    for (const Capture& capture : captures_) bytes += bytes_of(capture.queries);
    for (const LayerEntropy& entropy : entropy_) bytes += bytes_of(entropy.last);
    return bytes;
}

std::size_t Attention::bytes_of_workers(const Workers& workers) {
    std::size_t bytes = 0;
    for (const Worker& worker : workers)
        bytes += bytes_of(worker.query) + bytes_of(worker.output) + bytes_of(worker.kernel) +
                 bytes_of(worker.kept) + bytes_of(worker.softmax) + bytes_of(worker.recall) +
                 bytes_of(worker.recall_positions);
    return bytes;
}

void Attention::release_scratch() {
    for (std::vector<float>* values : {&partials_, &logits_, &observed_})
        std::vector<float>().swap(*values);
    for (Worker& worker : workers_) std::vector<float>().swap(worker.kept);
    for (Carried& carried : carried_) carried = Carried{};
}

// What is left over where heads are no multiple of the threads waits for the next layer. (Not
// longer: what was staged and observed is still there then.)
void Attention::prepare(int layer, int n_threads) noexcept {
    n_working_ = n_threads;
    const int done = recalling_ ? commits_so_far_ : commits_due_;
    commits_before_ = commits_so_far_;
    if (queues(layer)) commits_so_far_ += store_.shape(layer).n_head_kv;
    const bool waits = queues(layer) && layer + 1 < store_.n_layers();
    const int left_over = waits ? (commits_so_far_ - done) % n_threads : 0;
    commits_due_ = std::max(commits_before_, commits_so_far_ - left_over);
    recalled_heads_.store(0, std::memory_order_relaxed);
    ready_.store(false, std::memory_order_relaxed);
    if (!recalling_) make_units(layer);
}

void Attention::make_units(int layer) noexcept {
    const Split split = split_of(layer);
    const int n_heads = store_.shape(layer).n_head_kv;
    for (int reader = 0; reader < store_.shape(layer).readers; ++reader) {
        Job& job = job_of(layer, reader);
        int units = 0;
        for (int h = 0; h < n_heads; ++h) {
            const int of_head = units_of(split, total_entries(layer, h));
            job.first_unit[index(h)] = units;
            job.unfinished_units[index(h)].store(of_head, std::memory_order_relaxed);
            job.next_unit[index(h)].store(units, std::memory_order_relaxed);
            units += of_head;
        }
        job.first_unit[index(n_heads)] = units;
        job.unfinished_heads.store(n_heads, std::memory_order_relaxed);
    }
}

// ------------------------------------------------------------------------------------------------
// the graph's nodes

// Calls visit(token, head, page, slot) for the thread's part of the micro-batch: whole groups,
// since neighbours share cache lines.
template <typename Visit>
void Attention::over_staged(int layer, int thread, int n_threads, Visit visit) noexcept {
    const PageLayout& layout = store_.layout(layer);
    const int n_heads = store_.shape(layer).n_head_kv;
    const int n_groups = (n_tokens_ + kGroupEntries - 1) / kGroupEntries;
    for (int i = thread; i < n_groups * n_heads; i += n_threads) {
        const int head = i % n_heads;
        const int first = i / n_heads * kGroupEntries;
        for (int token = first; token < std::min(first + kGroupEntries, n_tokens_); ++token)
            visit(token, head, store_.staging(layer, head)[token / layout.entries],
                  token % layout.entries);
    }
}

void Attention::stage_k(int layer, const RowsView& k, int thread, int n_threads) noexcept {
    if (thread == 0) prepare(layer, std::min(n_threads, this->n_threads()));
    const PageLayout& layout = store_.layout(layer);
    over_staged(layer, thread, n_threads, [&](int token, int head, std::byte* page, int slot) {
        kernels_.store_k(layout, page, slot, k.row(token, head));
        layout.positions(page)[slot] = base_position_ + token;
        layout.importance(page)[slot] = 0.0f;
    });
}

void Attention::stage_v(int layer, const RowsView& v, int thread, int n_threads) noexcept {
    const PageLayout& layout = store_.layout(layer);
    over_staged(layer, thread, n_threads, [&](int token, int head, std::byte* page, int slot) {
        kernels_.store_v(layout, page, slot, v.row(token, head));
    });
}

// Every head by its own thread. What the heads hold is known when the last one is done: then the
// units are made, and no unit begins before that.
void Attention::recall(const Call& call) noexcept {
    const int n_heads = store_.shape(call.layer).n_head_kv;
    for (int head = 0; head < n_heads; ++head) {
        if (!owns(call, head)) continue;
        recall_head(call, head);
        if (recalled_heads_.fetch_add(1, std::memory_order_acq_rel) + 1 < n_heads) continue;
        make_units(call.layer);
        ready_.store(true, std::memory_order_release);
    }
    run_commits(commits_before_, call.thread);
    wait_for(ready_);
}

void Attention::recall_head(const Call& call, int head) noexcept {
    const PageLayout& layout = store_.layout(call.layer);
    const int group = call.split.group;
    float* rows = workers_[index(call.thread)].recall.data();
    const int n_looking = std::clamp(kMostQueryRows / group, 1, n_text_);  // the last ones
    std::int32_t* positions = workers_[index(call.thread)].recall_positions.data();
    float* slopes =
        call.params->slopes != nullptr ? rows + kMostQueryRows * layout.k_stride : nullptr;
    int n = 0;
    for (int token = n_text_ - n_looking; token < n_text_; ++token) {
        for (int g = 0; g < std::min(group, kMostQueryRows); ++g, ++n) {
            positions[n] = base_position_ + token;
            if (slopes != nullptr) slopes[n] = call.params->slopes[head * group + g];
            const float* query = call.query->row(token, head * group + g);
            float* row = rows + n * layout.k_stride;
            for (int d = 0; d < layout.k_dim; ++d) row[d] = query[d] * call.params->scale;
            std::fill(row + layout.k_dim, row + layout.k_stride, 0.0f);
        }
    }
    store_.recall(call.layer, head, n_text_,
                  {rows, n, layout.k_stride, call.params->softcap, positions, slopes},
                  base_position_ + n_text_ - 1, call.thread);
}

// A unit of the thread's own heads, then of the others.
int Attention::claim(const Call& call, Cursor& cursor) noexcept {
    const int n_heads = store_.shape(call.layer).n_head_kv;
    while (true) {
        for (; cursor.head < n_heads; ++cursor.head) {
            if (owns(call, cursor.head) == cursor.others) continue;
            std::atomic<int>& next = call.job->next_unit[index(cursor.head)];
            const int unit = next.fetch_add(1, std::memory_order_relaxed);
            if (unit < call.job->first_unit[index(cursor.head + 1)]) return unit;
        }
        if (cursor.others) return -1;
        cursor = {true, 0};
    }
}

void Attention::attend(int layer, int reader, const AttentionParams& params, const RowsView& query,
                       float* output, int thread) noexcept {
    Job& job = job_of(layer, reader);
    const Call call{layer, reader, &job, split_of(layer), &params, &query, output, thread};
    if (capture_queries_ && thread == 0) capture_queries(call);
    if (recalling_ && reader == 0) recall(call);
    Cursor cursor;
    // One unit ahead, so that its first entries can be asked for in time.
    for (int unit = claim(call, cursor); unit >= 0;) {
        const int next = claim(call, cursor);
        run_unit(call, unit, next);
        unit = next;
    }
}

}  // namespace entropykv
