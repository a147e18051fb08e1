// Declares the kernels of the attention op, with one table per instruction set. They work on pages
// (see page_layout.hpp), allocate nothing, and know nothing of heads, budgets or threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/kernel_types.hpp"
#include "page/key_sketch.hpp"
#include "page/page_layout.hpp"

namespace entropykv {

constexpr int kRowTile = 64;    // query rows of a prompt tile
constexpr int kEntryTile = 64;  // entries converted at a time
constexpr float kMaskedLogit = -1e30f;
constexpr int kMaxFeatures = 2 * kMaxHeadDim + kMaxHeadDim / 2 + 3;  // see kernel_types.hpp

// Refers to the entries [first, last) of one KV head, in the order of its page table.
struct EntryRange {
    const PageLayout* layout;
    const std::byte* const* pages;
    int first;
    int last;
};

// Holds what an online softmax passes from one range to the next, per query row: the largest logit
// m (in the prompt kernel in bits, that is log2(e) times the logit, perhaps rounded up), the sum of
// e^(l-m), the sum of e^(l-m)(l-m) for the entropy, and the unnormalised output.
struct SoftmaxState {
    float* max;
    float* sum;
    float* weighted;
    float* output;
};

// Describes `rows` query rows that see the same entries: one token of a GQA group.
struct DecodeTask {
    EntryRange entries;
    const float* query;  // [rows][layout.k_stride], scaled
    int rows;
    float softcap;          // 0: logits are not capped
    std::int32_t position;  // position of the token
    float oldest;           // relative to the token; earlier entries are not seen (sliding window)
    const float* slopes;    // [rows]: by what a logit falls per position (ALiBi); null: 0
    float* logits;          // [rows][logits_stride], from entries.first on; null: not kept
    std::size_t logits_stride;
    SoftmaxState state;   // with an output of [rows][layout.v_stride]
    EntryRange upcoming;  // what the thread reads next, for prefetching; null layout: unknown
};

// Describes up to kRowTile query rows, each with its own position. Positions of rows are relative
// to the first token of the micro-batch, so that floats can hold them. For entries, the difference
// to that token is computed in integers.
struct PromptTask {
    EntryRange entries;
    const float* query;          // [layout.k_stride][kRowTile], scaled
    std::int32_t base_position;  // position of the first token of the micro-batch
    const float* row_positions;  // [kRowTile], relative to base_position
    const float* row_oldest;  // [kRowTile], relative to base_position; earlier entries are not seen
    int rows;
    bool masked;  // false: every row sees every entry
    float softcap;
    const float* row_slopes;  // [kRowTile]: by what a logit falls per position (ALiBi), or null
    float* scratch;           // prompt_scratch_floats(layout) floats
    bool entropy;             // whether to compute state.weighted
    float* kept;              // kept_floats(entries) floats for prompt_observe, or null
    SoftmaxState state;       // with an output of [layout.v_stride][kRowTile]
};

// The prompt kernel keeps this many floats of a tile of entries: the maxima of the rows, and the
// weights of the entries, the first and last four of which may belong to other tiles.
constexpr int kKeptFloats = (1 + kEntryTile + 4) * kRowTile;
constexpr std::size_t kept_floats(const EntryRange& range) {
    const int tiles = (range.last - range.first + kEntryTile - 1) / kEntryTile;
    return static_cast<std::size_t>(tiles) * kKeptFloats;
}

std::size_t prompt_scratch_floats(const PageLayout& layout);

struct KernelTable {
    const char* name;
    // Stores a row of floats in a slot of a page, in the type of the page.
    void (*store_k)(const PageLayout&, std::byte* page, int slot, const float* row);
    void (*store_v)(const PageLayout&, std::byte* page, int slot, const float* row);
    // Rotates a row of V, or of outputs that attention made of rotated V, back: see
    // value_rotation.hpp.
    void (*rotate)(float* row, int stride);
    // Copies the values of K (not their scales) of some entries from a group to another one, which
    // may be in another page.
    void (*move_keys)(const PageLayout&, const std::byte* from, int from_group, std::byte* to,
                      int to_group, const LaneMoves&);
    void (*decode)(const DecodeTask&);
    void (*prompt)(const PromptTask&);
    // sums[j - task.entries.first] += what the rows give to entry j, times their weights [kRowTile]
    // (for some statistics the larger value instead of the sum). Rows nearer than `neighbourhood`
    // give nothing. task.state.max and task.state.sum must be final. task.kept: what prompt() kept
    // of the same range, so that scores need not be computed again; null: nothing.
    void (*prompt_observe)(const PromptTask&, Statistic, const float* row_weights,
                           float neighbourhood, float* sums);
    // Adds to sums[j], as prompt_observe() does, what one row gives to entry j of n. max and sum
    // belong to the row's softmax.
    void (*logits_observe)(const float* logits, int n, Statistic, float max, float sum,
                           float* sums);
    // Computes the squared norms of V of all layout.entries slots of a page.
    void (*value_norms)(const PageLayout&, const std::byte* page, float* norms);
    // Computes q.k of all slots of a page; queries are [rows][k_stride], out is [rows][out_stride].
    void (*products)(const PageLayout&, const std::byte* page, const float* queries, int rows,
                     float* out, int out_stride);
    // Estimates q.k from the sketch of a page, as products() computes it.
    void (*sketch_products)(const KeySketch&, const std::byte* page, const float* queries, int rows,
                            float* out, int out_stride);
    // Returns the logarithm of the sum of e^logit; n must be at least 1.
    float (*log_sum)(const float* logits, int n);
    // Computes the features of an entry: see FeatureShape. rotation: [pair][cosine, sine], rotates
    // the key back to position 0. value: not read if it is a part of the key.
    void (*features)(const FeatureShape&, const float* key, const float* value,
                     const float* rotation, float* out);
    // Multiply weights [n] with the features: predict_key() with all but those of the value, and
    // predict_value() with those.
    float (*predict_key)(const FeatureShape&, const float* weights, const float* key,
                         const float* rotation);
    float (*predict_value)(const FeatureShape&, const float* weights, const float* value);
    // Adds the outer products of rows [n_rows][stride] with themselves to sums, which hold the
    // lower triangle row by row. stride: n, padded with zeros to a multiple of 16.
    void (*add_products)(const float* rows, int n_rows, int stride, int n, double* sums);
};

// Returns all kernels that this machine can run, the slowest first.
std::vector<const KernelTable*> available_kernels();

extern const KernelTable kKernelsPortable;
#if defined(ENTROPYKV_X86)
extern const KernelTable kKernelsAvx2;
extern const KernelTable kKernelsAvx512;
extern const KernelTable kKernelsAvx512Vnni;
#elif defined(ENTROPYKV_ARM64)
extern const KernelTable kKernelsNeon;
#endif

}  // namespace entropykv
