// Attention of one micro-batch that holds tokens of several sequences: every sequence attends with
// its own store, positions and evictions, to its own range of tokens. Threads go from one sequence
// to the next without waiting for each other, so that all of them stay busy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/attention.hpp"

namespace entropykv {

class AttentionBatch {
public:
    // Begins another micro-batch, of no tokens yet.
    void clear();
    // Adds the next tokens, of a sequence that has none in it yet; those with a single token come
    // first. All sequences are of one StorePool. n_text, n_echo: see Attention::begin(). What
    // throws has added nothing.
    void add(Attention& sequence, int n_text, std::int32_t base_position,
             std::int32_t rope_position, int n_echo = 0);

    int n_tokens() const { return n_tokens_; }
    int n_threads() const { return parts_.empty() ? 0 : parts_.front().sequence->n_threads(); }

    // The graph's nodes: see Attention.
    void stage_k(int layer, const RowsView& k, int thread, int n_threads) noexcept;
    void stage_v(int layer, const RowsView& v, int thread, int n_threads) noexcept;
    void attend(int layer, int reader, const AttentionParams& params, const RowsView& query,
                float* output, int thread) noexcept;

private:
    struct Part {
        Attention* sequence;
        int first;  // token
    };

    std::vector<Part> parts_;
    int n_tokens_ = 0;
    std::size_t n_pages_ = 0;  // of the staging area
};

}  // namespace entropykv
