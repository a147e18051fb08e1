#include "attention/attention.hpp"

#include <algorithm>
#include <stdexcept>

#include "platform/relax.hpp"
#include "platform/scratch.hpp"
#include "store/frozen_heads.hpp"

namespace entropykv {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

std::vector<LayerShape> shapes_of(const HeadStore& store) {
    std::vector<LayerShape> shapes;
    for (int layer = 0; layer < store.n_layers(); ++layer) shapes.push_back(store.shape(layer));
    return shapes;
}

// Returns the queries that recall frozen entries of a KV head: the last ones of the text, scaled,
// in the scratch of the thread.
QueryRows recall_queries(const AttentionCall& call, int head) noexcept {
    const PageLayout& layout = call.layout();
    const Step& step = call.step;
    const int group = call.split.group;
    float* rows = call.worker.recall();
    const int n_last = std::clamp(kMostQueryRows / group, 1, step.n_text);
    std::int32_t* positions = call.worker.recall_positions();
    float* slopes =
        call.params.slopes != nullptr ? rows + kMostQueryRows * layout.k_stride : nullptr;
    int n = 0;
    for (int token = step.n_text - n_last; token < step.n_text; ++token) {
        for (int g = 0; g < std::min(group, kMostQueryRows); ++g, ++n) {
            positions[n] = step.base_position + token;
            if (slopes != nullptr) slopes[n] = call.params.slopes[head * group + g];
            float* row = rows + n * layout.k_stride;
            call.load_query(head, token, g, row, 1);
            std::fill(row + layout.k_dim, row + layout.k_stride, 0.0f);
        }
    }
    return {rows, n, layout.k_stride, call.params.softcap, positions, slopes};
}

}  // namespace

Attention::Attention(HeadStore& store, const KernelTable& kernels, int n_threads,
                     std::shared_ptr<Workers> workers)
    : store_(store),
      kernels_(kernels),
      n_threads_(std::max(n_threads, 1)),
      shared_workers_(workers != nullptr ? workers : std::make_shared<Workers>()),
      workers_(*shared_workers_),
      owns_workers_(workers == nullptr),
      entropies_(shapes_of(store)),
      queries_(shapes_of(store)),
      observations_(store.settings().importance.measure(), index(store.n_layers())),
      commits_(store, n_threads_) {
    step_.importance = store.settings().importance;
    if (workers_.size() < index(n_threads_)) workers_.resize(index(n_threads_));
    store_.set_workers(n_threads, kernels);
    for (int l = 0; l < store_.n_layers(); ++l) {
        first_units_.push_back(units_.size());
        for (int r = 0; r < store_.shape(l).readers; ++r)
            units_.emplace_back(store_.shape(l).n_head_kv);
        for (Worker& worker : workers_)
            worker.serve(store_.layout(l), store_.settings().freezing.has_value());
    }
}

void Attention::begin(const StepTokens& reading) {
    const auto [n_text, position, rope_position, n_echo, n_drafts, see_all, recalls] = reading;
    if (see_all && n_echo > 0)
        throw std::invalid_argument("tokens that all see each other have no echo");
    if (n_drafts < 0 || (n_drafts > 0 && (n_text != 1 + n_drafts || n_echo > 0 || see_all ||
                                          n_drafts > most_drafts(n_drafts))))
        throw std::invalid_argument("a run with drafts that cannot be undone");
    if (n_text < 0 || n_echo < 0 || n_text + n_echo < 1 ||
        n_text > store_.settings().max_tokens - n_echo)
        throw std::invalid_argument("a micro-batch outside of 1 .. max_tokens");
    const int n_tokens = n_text + n_echo;
    if (position < 0 || position > kMostPositions - n_tokens)
        throw std::invalid_argument("a position outside of 0 .. 2^30");
    const auto& freezing = store_.settings().freezing;
    const int interval = freezing ? freezing->recall_interval : 0;
    step_.recalling = interval > 0 && n_text > 0 && FrozenFigures(store_.components()).now() > 0 &&
                      (recalls_now_ || (n_tokens > 1 ? recalls : position % interval == 0));
    store_.reserve(n_text, position + n_text - 1, step_.recalling, n_echo, n_drafts);
    recalls_now_ = false;
    store_.components().inverse_ropes.prepare(rope_position, n_text);
    step_.n_tokens = n_tokens;
    step_.n_text = n_text;
    step_.n_drafts = n_drafts;
    step_.base_position = position;
    step_.see_all = see_all;
    const bool predicts = step_.importance.predicts();
    // With predicted scores, the queries of an echo only raise predicted shares. An echo of a
    // single token is ignored, because one query shows too little.
    step_.observing = (n_text > 0 || !predicts) &&
                      step_.importance.measure().observes(
                          n_tokens, position, store_.components().common.scoring_interval());
    step_.observing_echo = n_echo > 0 && n_tokens > 1 && predicts;
    commits_.begin(n_text);
    entropies_.begin(step_);
    queries_.begin(n_tokens);
    reserve();
}

// Returns how many entries a head attends to at most in this micro-batch: recall adds only as many
// as the budget has room for.
int Attention::most_entries(int layer, int head) const {
    const Head& of = store_.head(layer, head);
    const int total = of.count() + step_.n_tokens;
    const int recalled = step_.recalling ? Recall::most(of) : 0;
    const int n_echo = step_.n_tokens - step_.n_text;
    return std::max(total, std::min(total + recalled, of.budget() + n_echo));
}

int Attention::most_drafts(int wanted) const {
    if (shared_choice_ || entropies_.tracks() || queries_.captures()) return 0;
    return store_.most_drafts(wanted);
}

// All layers use the same scratch, so it is sized for the largest.
void Attention::reserve() {
    // The tokens of a run with drafts are attended to one after the other.
    const int n_at_once = step_.n_drafts > 0 ? 1 : step_.n_tokens;
    Observations::Room room{0, 0, 0, n_at_once == 1};
    std::size_t kept = 0;  // the most floats that are kept of a tile
    for (int l = 0; l < store_.n_layers(); ++l) {
        const Split split = Split::of(store_.shape(l), n_at_once);
        const int n_heads = store_.shape(l).n_head_kv;
        std::size_t slots = 0;
        for (int h = 0; h < n_heads; ++h) {
            const int most = most_entries(l, h);
            room.longest = std::max(room.longest, index(most));
            if (split.by_entries) slots += index(split.tiles * split.most_chunks(most));
            kept = std::max(kept, step_.most_kept_floats(split, most));
        }
        grow(partials_, slots * index(split.tile_rows) * index(store_.layout(l).v_stride + 3));
        if (!step_.observing && !step_.observing_echo) continue;
        const int rows = n_heads * step_.observed_bands(split) * (step_.observing_echo ? 2 : 1);
        room.rows = std::max(room.rows, index(rows));
        if (!split.by_rows) room.logits = std::max(room.logits, index(n_heads * split.group));
    }
    observations_.begin(room);
    for (int l = 0; l < store_.n_layers(); ++l)
        if (store_.shape(l).readers > 1)
            observations_.begin_carrying(l, index(store_.shape(l).n_head_kv), step_.observing_echo);
    for (Worker& worker : workers_) worker.keep(kept);
}

std::size_t Attention::scratch_bytes() const {
    return bytes_of(partials_) + (owns_workers_ ? bytes_of_workers(workers_) : 0) +
           observations_.bytes() + queries_.bytes() + entropies_.bytes();
}

void Attention::release_scratch() {
    std::vector<float>().swap(partials_);
    observations_.release();
    for (Worker& worker : workers_) worker.release();
}

void Attention::prepare(int layer, int n_threads) noexcept {
    const LayerShape& shape = store_.shape(layer);
    const bool queued = queues(step_, shape, shared_choice_);
    next_head_.store(0, std::memory_order_relaxed);
    commits_.prepare(
        {queued ? shape.n_head_kv : 0, layer + 1 == store_.n_layers(), step_.recalling, n_threads});
    recalled_heads_.store(0, std::memory_order_relaxed);
    ready_.store(false, std::memory_order_relaxed);
    if (!step_.recalling) make_units(layer);
}

void Attention::make_units(int layer) noexcept {
    const Split split = Split::of(store_.shape(layer), step_.n_drafts > 0 ? 1 : step_.n_tokens);
    for (int reader = 0; reader < store_.shape(layer).readers; ++reader)
        units_of(layer, reader).fill([&](int head) {
            // Heads change their lengths within a run with drafts.
            if (step_.n_drafts > 0)
                return split.tiles * split.most_chunks(most_entries(layer, head));
            return split.units(store_.head(layer, head).count() + step_.n_tokens);
        });
}

// Calls visit(token, head, page, slot) for the part of the micro-batch that this thread stages. A
// part is made of whole groups, since the entries of a group share cache lines.
template <typename Visit>
void Attention::over_staged(int layer, int thread, int n_threads, Visit visit) noexcept {
    const PageLayout& layout = store_.layout(layer);
    const int n_heads = store_.shape(layer).n_head_kv;
    const int n_groups = (step_.n_tokens + kGroupEntries - 1) / kGroupEntries;
    for (int i = thread; i < n_groups * n_heads; i += n_threads) {
        const int head = i % n_heads;
        const int first = i / n_heads * kGroupEntries;
        const int end = std::min(first + kGroupEntries, step_.n_tokens);
        for (int token = first; token < end; ++token)
            if (step_.n_drafts > 0)
                visit(token, head, store_.staging(layer, head)[token], 0);
            else
                visit(token, head, store_.staging(layer, head)[token / layout.entries],
                      token % layout.entries);
    }
}

void Attention::stage_k(int layer, const RowsView& k, int thread, int n_threads) noexcept {
    if (thread == 0) prepare(layer, std::min(n_threads, this->n_threads()));
    const PageLayout& layout = store_.layout(layer);
    const LayerPredictor predictor = store_.components().predictor(index(layer));
    over_staged(layer, thread, n_threads, [&](int token, int head, std::byte* page, int slot) {
        const float* key = k.row(token, head);
        kernels_.store_k(store_.head(layer, head).layout(), page, slot, key);
        layout.positions(page)[slot] = step_.base_position + token;
        layout.importance(page)[slot] =
            predictor && token < step_.n_text
                ? predictor.with_key(head, predictor.inverse_rope->of(token), key)
                : 0.0f;
    });
}

void Attention::stage_v(int layer, const RowsView& v, int thread, int n_threads) noexcept {
    const PageLayout& layout = store_.layout(layer);
    const LayerPredictor predictor = store_.components().predictor(index(layer));
    over_staged(layer, thread, n_threads, [&](int token, int head, std::byte* page, int slot) {
        const float* value = v.row(token, head);
        kernels_.store_v(layout, page, slot, value);
        if (!predictor || token >= step_.n_text) return;
        float& score = layout.importance(page)[slot];
        score = predictor.with_value(head, score, value);
    });
}

// For each head, its own thread recalls entries. Only after the last head is it known how many
// entries the heads hold, so the units of work are made then, and all threads wait for that.
void Attention::recall(const AttentionCall& call) noexcept {
    const int n_heads = store_.shape(call.layer).n_head_kv;
    for (int head = 0; head < n_heads; ++head) {
        if (!commits_.owns(head, call.thread)) continue;
        store_.recall(call.layer, head, step_.n_text, recall_queries(call, head),
                      step_.base_position + step_.n_text - 1, call.thread);
        if (recalled_heads_.fetch_add(1, std::memory_order_acq_rel) + 1 < n_heads) continue;
        make_units(call.layer);
        ready_.store(true, std::memory_order_release);
    }
    commits_.run_before(call.thread);
    wait_for(ready_);
}

// One thread attends to a head with all tokens of a run with drafts, since each token attends to
// what the commit of the token before it has left.
void Attention::attend_run(const AttentionCall& call) noexcept {
    const int n_heads = call.shape().n_head_kv;
    const int interval = store_.components().common.scoring_interval();
    const std::size_t values = index(output_values(call.layer));
    const Split split = Split::of(call.shape(), 1);
    for (int head = next_head_.fetch_add(1); head < n_heads; head = next_head_.fetch_add(1)) {
        for (int token = 0; token < step_.n_tokens; ++token) {
            const Step step = step_.of_token(token, interval);
            const RowsView query = call.query.from(token);
            float* const output = call.output + index(token) * values;
            const AttentionCall of_token{call, call, call, {step, split, query, output, token}};
            HeadAttention of_head(of_token);
            const int total = of_token.total(head);
            for (int unit = 0; unit < split.units(total); ++unit)
                of_head.run(split.unit(head, unit, total), -1);
            of_head.merge(head);
            store_.commit_token(call.layer, head, token, step.base_position,
                                of_token.sum_observed(head), call.thread);
        }
    }
}

void Attention::attend(int layer, int reader, const AttentionParams& params, const RowsView& query,
                       float* output, int thread) noexcept {
    const Split split = Split::of(store_.shape(layer), step_.n_tokens);
    const AttentionCall call{
        {store_, kernels_, entropies_, observations_, commits_, shared_choice_, partials_.data()},
        {layer, reader, units_of(layer, reader), params},
        {thread, workers_[index(thread)]},
        {step_, split, query, output}};
    if (queries_.captures() && thread == 0) queries_.take(layer, params, query);
    if (step_.recalling && reader == 0) recall(call);
    if (step_.n_drafts > 0) return attend_run(call);
    HeadAttention heads(call);
    const auto owns = [&](int head) { return commits_.owns(head, thread); };
    UnitQueue::Cursor cursor;
    // A thread claims one unit ahead, so that it can prefetch the first entries of the next one.
    for (int number = call.units.claim(cursor, owns); number >= 0;) {
        const int next = call.units.claim(cursor, owns);
        const Unit unit = call.unit(number);
        heads.run(unit, next);
        if (call.units.ends_head(unit.tile.head)) heads.merge_and_commit(unit.tile.head);
        number = next;
    }
}

void AttentionBatch::clear() {
    parts_.clear();
    n_tokens_ = 0;
    n_pages_ = 0;
}

void AttentionBatch::add(Attention& sequence, const StepTokens& reading) {
    for (const Part& part : parts_)
        if (part.sequence == &sequence)
            throw std::invalid_argument("a sequence has one part of a micro-batch");
    const Staging& staging = sequence.store().share().pool().staging();
    if (reading.n_text < 0 || reading.n_echo < 0 ||
        reading.n_text > kMostPositions - reading.n_echo)
        throw std::invalid_argument("a micro-batch outside of 1 .. max_tokens");
    const int n_tokens = reading.n_tokens();
    // Every token of a run with drafts is staged in a page of its own.
    const std::size_t pages =
        reading.n_drafts > 0 ? static_cast<std::size_t>(n_tokens) : staging.pages_of(n_tokens);
    if (n_pages_ + pages > staging.row_pages())
        throw std::invalid_argument("more tokens than the staging area holds");
    if (n_tokens == 1 && n_pages_ >= staging.single_pages())
        throw std::invalid_argument("sequences with a single token come first");
    parts_.reserve(parts_.size() + 1);
    sequence.begin(reading);
    sequence.store().stage_at(n_pages_);
    parts_.push_back({&sequence, n_tokens_});
    n_tokens_ += n_tokens;
    n_pages_ += pages;
}

int AttentionBatch::most_drafts(const Attention& sequence, int wanted) const {
    const Staging& staging = sequence.store().share().pool().staging();
    // A sequence that is alone in its pool may use all of the staging area.
    const int room = staging.single_pages() == 1
                         ? static_cast<int>(staging.row_pages() - n_pages_) - 1
                         : staging.n_drafts();
    return sequence.most_drafts(std::min(wanted, std::max(room, 0)));
}

void AttentionBatch::stage_k(int layer, const RowsView& k, int thread, int n_threads) noexcept {
    for (const Part& part : parts_)
        part.sequence->stage_k(layer, k.from(part.first), thread, n_threads);
}

void AttentionBatch::stage_v(int layer, const RowsView& v, int thread, int n_threads) noexcept {
    for (const Part& part : parts_)
        part.sequence->stage_v(layer, v.from(part.first), thread, n_threads);
}

// The last part goes first, since it may be a long chunk of a prompt: threads that finish it early
// then compute the short parts. No thread commits before all parts are attended to, because a
// commit waits until the heads are ready.
void AttentionBatch::attend(int layer, int reader, const AttentionParams& params,
                            const RowsView& query, float* output, int thread) noexcept {
    for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
        const auto first = static_cast<std::size_t>(part->first);
        const auto values = static_cast<std::size_t>(part->sequence->output_values(layer));
        part->sequence->attend(layer, reader, params, query.from(part->first),
                               output + first * values, thread);
    }
    for (const Part& part : parts_) part.sequence->commit_due(thread);
}

}  // namespace entropykv
