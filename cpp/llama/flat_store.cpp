#include "llama/flat_store.hpp"

#include <llama.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "decide/rope_params.hpp"

namespace entropykv {
namespace {

constexpr llama_seq_id kSequence = 0;
constexpr int kCellPadding = 256;  // llama.cpp rounds the attended width up to this

class Stopwatch {
public:
    explicit Stopwatch(double& total) : total_(total) {}
    ~Stopwatch() {
        total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

private:
    double& total_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

auto score_by_position(ScoreKind kind) {
    const auto score = measure_of(kind).by_position;
    if (score == nullptr)
        throw std::invalid_argument("the flat store ranks entries by position alone");
    return score;
}

}  // namespace

FlatEviction plan_flat_eviction(const std::vector<std::int32_t>& positions, int keep,
                                ScoreKind score, const Protection& protection) {
    const auto score_of = score_by_position(score);
    FlatEviction plan;
    if (positions.empty()) return plan;
    const std::int32_t newest = positions.back();
    const std::size_t n = positions.size();
    std::vector<float> scores(n);
    score_of(positions.data(), static_cast<int>(n), newest, scores.data());
    std::vector<std::uint8_t> kept(n);
    std::vector<float> scratch(n);
    select_survivors(scores.data(), positions.data(), static_cast<int>(n), keep, protection, newest,
                     kept.data(), scratch.data());
    for (std::size_t i = 0; i < n; ++i) {
        if (kept[i] != 0) {
            plan.kept.push_back(positions[i]);
        } else if (!plan.removed.empty() && i > 0 && kept[i - 1] == 0) {
            plan.removed.back().second = positions[i] + 1;
        } else {
            plan.removed.emplace_back(positions[i], positions[i] + 1);
        }
    }
    return plan;
}

FlatStore::FlatStore(llama_context* context, int budget, ScoreKind score,
                     const Protection& protection, int rope_sinks)
    : context_(context),
      budget_(budget),
      score_(score),
      protection_(protection),
      rope_sinks_(rope_sinks) {
    score_by_position(score);  // throws for measures that need more than positions
}

// Removes positions [first, last) of the text from llama.cpp's cache. Throws std::runtime_error if
// the model's memory cannot do that.
void FlatStore::remove(std::int32_t first, std::int32_t last) {
    const auto place = [&](std::int32_t p) { return rope_position(p, rope_sinks_, shift_); };
    if (!llama_memory_seq_rm(llama_get_memory(context_), kSequence, place(first),
                             place(last - 1) + 1))
        throw std::runtime_error("the model's memory cannot remove a range of positions");
}

void FlatStore::evict(int keep) {
    const Stopwatch watch(eviction_seconds_);
    const FlatEviction plan = plan_flat_eviction(positions_, keep, score_, protection_);
    for (const auto& [first, last] : plan.removed) remove(first, last);
    evicted_ += positions_.size() - plan.kept.size();
    positions_ = plan.kept;
}

std::vector<std::uint8_t> FlatStore::saved_state() {
    std::vector<std::uint8_t> state(llama_state_seq_get_size(context_, kSequence));
    largest_copy_ = std::max(largest_copy_, state.size());
    if (llama_state_seq_get_data(context_, state.data(), state.size(), kSequence) != state.size())
        throw std::runtime_error("llama.cpp did not save the state of its cache");
    return state;
}

void FlatStore::restore_state(llama_context* context, const std::uint8_t* state, std::size_t size) {
    if (llama_state_seq_set_data(context, state, size, kSequence) != size)
        throw std::runtime_error("llama.cpp did not restore the state of its cache");
}

void FlatStore::replace_state(const std::uint8_t* state, std::size_t size) {
    llama_memory_clear(llama_get_memory(context_), false);
    if (size > 0) restore_state(context_, state, size);
}

void FlatStore::compact() {
    const Stopwatch watch(eviction_seconds_);
    const std::vector<std::uint8_t> state = saved_state();
    replace_state(state.data(), state.size());
    highest_cell_ = static_cast<int>(positions_.size());
}

std::vector<std::uint8_t> FlatStore::save_state() {
    if (positions_.empty()) return {};
    compact();
    return saved_state();
}

void FlatStore::load_state(std::vector<std::int32_t> positions, const std::uint8_t* state,
                           std::size_t size, std::size_t evicted, int shift) {
    std::vector<std::uint8_t> before;
    if (!positions_.empty()) before = saved_state();
    try {
        replace_state(state, size);
        const llama_pos newest = llama_memory_seq_pos_max(llama_get_memory(context_), kSequence);
        if (newest !=
            (positions.empty() ? -1 : rope_position(positions.back(), rope_sinks_, shift)))
            throw std::runtime_error("the state of llama.cpp's cache ends elsewhere");
    } catch (const std::exception&) {
        replace_state(before.data(), before.size());
        highest_cell_ = static_cast<int>(positions_.size());
        throw;
    }
    positions_ = std::move(positions);
    shift_ = shift;
    evicted_ = evicted;
    highest_cell_ = static_cast<int>(positions_.size());
    peak_ = std::max(peak_, highest_cell_);
    if (highest_cell_ > budget_) evict(budget_);
}

void FlatStore::move_to(llama_context* context) {
    std::vector<std::uint8_t> state;
    if (!positions_.empty()) state = saved_state();
    if (!state.empty()) restore_state(context, state.data(), state.size());
    context_ = context;
    highest_cell_ = static_cast<int>(positions_.size());
}

void FlatStore::make_room(int n_tokens) {
    // A long micro-batch fills the holes itself, so compaction is not needed.
    const int holes = highest_cell_ - static_cast<int>(positions_.size()) - n_tokens;
    if (holes >= kCellPadding) compact();
}

void FlatStore::settle(std::int32_t position, int n_tokens) {
    for (int i = 0; i < n_tokens; ++i) positions_.push_back(position + i);
    const int count = static_cast<int>(positions_.size());
    highest_cell_ = std::max(highest_cell_, count);
    peak_ = std::max(peak_, count);
    if (count <= budget_) return;
    evict(entries_to_keep(budget_, n_tokens, protection_));
}

void FlatStore::set_budget(int budget, const Protection& protection) {
    budget_ = budget;
    protection_ = protection;
    if (static_cast<int>(positions_.size()) > budget_) evict(budget_);
}

void FlatStore::truncate(std::int32_t position) {
    if (!llama_memory_seq_rm(llama_get_memory(context_), kSequence,
                             rope_position(position, rope_sinks_, shift_), -1))
        throw std::runtime_error("the model's memory cannot remove a range of positions");
    positions_.erase(std::lower_bound(positions_.begin(), positions_.end(), position),
                     positions_.end());
}

void FlatStore::rebase(int shift) {
    const Stopwatch watch(eviction_seconds_);
    const auto sinks_end = std::lower_bound(positions_.begin(), positions_.end(), rope_sinks_);
    const auto clamped_end = std::lower_bound(sinks_end, positions_.end(), rope_sinks_ + shift);
    if (clamped_end != sinks_end) {
        remove(*sinks_end, *(clamped_end - 1) + 1);
        evicted_ += static_cast<std::size_t>(clamped_end - sinks_end);
        positions_.erase(sinks_end, clamped_end);
    }
    llama_memory_seq_add(llama_get_memory(context_), kSequence, rope_sinks_, -1, shift_ - shift);
    shift_ = shift;
}

}  // namespace entropykv
