#include "attention/attention_batch.hpp"

#include <algorithm>
#include <stdexcept>

namespace entropykv {

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
    for (const Part& part : parts_) part.sequence->finish(thread);
}

}  // namespace entropykv
