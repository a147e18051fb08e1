// Computes the attention of a micro-batch that holds tokens of several sequences. Each sequence
// attends to its own range of tokens with its own store, positions and evictions. Threads go on to
// the next sequence without waiting for each other, so that all of them stay busy.
#pragma once

#include <cstddef>
#include <vector>

#include "attention/attention.hpp"

namespace entropykv {

class AttentionBatch {
public:
    // Begins another micro-batch, which has no tokens yet.
    void clear();
    // Adds the next tokens, which belong to a sequence without tokens in this micro-batch.
    // Sequences with a single token must be added first, and all must share one StorePool. If this
    // throws, nothing was added.
    void add(Attention& sequence, const StepTokens& reading);

    // Returns how many drafts may follow the next token of a sequence, at most `wanted`, so that
    // all other sequences still find room.
    int most_drafts(const Attention& sequence, int wanted) const;

    int n_tokens() const { return n_tokens_; }
    int n_threads() const { return parts_.empty() ? 0 : parts_.front().sequence->n_threads(); }

    // The nodes of the graph call these: see Attention.
    void stage_k(int layer, const RowsView& k, int thread, int n_threads) noexcept;
    void stage_v(int layer, const RowsView& v, int thread, int n_threads) noexcept;
    void attend(int layer, int reader, const AttentionParams& params, const RowsView& query,
                float* output, int thread) noexcept;

private:
    struct Part {
        Attention* sequence;
        int first;  // its first token in the micro-batch
    };

    std::vector<Part> parts_;
    int n_tokens_ = 0;
    std::size_t n_pages_ = 0;  // pages of the staging area in use
};

}  // namespace entropykv
