// The kernels of the attention op, one table of them per instruction set. They work on pages (see
// page_layout.hpp), allocate nothing and know nothing of heads, budgets or threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/contest.hpp"
#include "decide/feature_shape.hpp"
#include "decide/statistic.hpp"
#include "page/key_sketch.hpp"
#include "page/page_layout.hpp"

namespace entropykv {

constexpr int kRowTile = 64;    // query rows of one prompt tile
constexpr int kEntryTile = 64;  // entries converted to f32 at a time
constexpr float kMaskedLogit = -1e30f;
constexpr int kMaxFeatures = 2 * kMaxHeadDim + kMaxHeadDim / 2 + 3;  // see feature_shape.hpp

// Entries [first, last) of one KV head, in the order of its page table.
struct EntryRange {
    const PageLayout* layout;
    const std::byte* const* pages;
    int first;
    int last;
};

// What an online softmax carries from one range to the next, per query row: the largest logit m (of
// the prompt kernel: in bits, log2(e) times that, perhaps rounded up), sum of e^(l-m), sum of
// e^(l-m)(l-m) (for the entropy), and the unnormalised output.
struct SoftmaxState {
    float* max;
    float* sum;
    float* weighted;
    float* output;
};

// rows query rows that see the same entries (one token of a GQA group).
struct DecodeTask {
    EntryRange entries;
    const float* query;  // [rows][layout.k_stride], scaled
    int rows;
    float softcap;          // 0: none
    std::int32_t position;  // of the token
    float oldest;           // relative to it: entries before are not seen (sliding window)
    const float* slopes;    // [rows]: what a logit falls by per position (ALiBi); null: nothing
    float* logits;          // [rows][logits_stride], from entries.first on; null: not kept
    std::size_t logits_stride;
    SoftmaxState state;   // output [rows][layout.v_stride]
    EntryRange upcoming;  // what the thread reads next: asked for early; layout null: not known
};

// Up to kRowTile query rows, each with its own position. Those of rows are relative to the
// micro-batch's first token, and so small that floats hold them; of entries, differences to it are
// taken as integers.
struct PromptTask {
    EntryRange entries;
    const float* query;          // [layout.k_stride][kRowTile], scaled
    std::int32_t base_position;  // of the micro-batch's first token
    const float* row_positions;  // [kRowTile], relative to it
    const float* row_oldest;     // [kRowTile], relative to it; entries before are not seen
    int rows;
    bool masked;  // false: every row sees every entry
    float softcap;
    const float* row_slopes;  // [kRowTile]: what a logit falls by per position (ALiBi), or null
    float* scratch;           // prompt_scratch_floats(layout)
    bool entropy;             // whether state.weighted is wanted
    float* kept;              // kept_floats(entries) for prompt_observe, or null: not kept
    SoftmaxState state;       // output [layout.v_stride][kRowTile]
};

// What the prompt kernel can keep of a tile of entries: the rows' maxima there, and the weights of
// its entries, of which the first and the last four may be others.
constexpr int kKeptFloats = (1 + kEntryTile + 4) * kRowTile;
constexpr std::size_t kept_floats(const EntryRange& range) {
    const int tiles = (range.last - range.first + kEntryTile - 1) / kEntryTile;
    return static_cast<std::size_t>(tiles) * kKeptFloats;
}

std::size_t prompt_scratch_floats(const PageLayout& layout);

struct KernelTable {
    const char* name;
    // Quantises rows of head_dim floats into the slots of a page.
    void (*store_k)(const PageLayout&, std::byte* page, int slot, const float* row);
    void (*store_v)(const PageLayout&, std::byte* page, int slot, const float* row);
    // The values of K (not their scales) of some entries of a group of a page, to another's.
    void (*move_keys)(const PageLayout&, const std::byte* from, int from_group, std::byte* to,
                      int to_group, const LaneMoves&);
    void (*decode)(const DecodeTask&);
    void (*prompt)(const PromptTask&);
    // sums[j - first] += what the rows give to entry j, each times its weight [kRowTile] (or the
    // largest of both); rows nearer than `neighbourhood` give nothing. state.max and state.sum are
    // final; `kept` is what prompt() kept of the same range, and spares the scores.
    void (*prompt_observe)(const PromptTask&, Statistic, const float* row_weights,
                           float neighbourhood, float* sums);
    // sums[j] += what one row gives to entry j of n; max and sum: of its softmax.
    void (*logits_observe)(const float* logits, int n, Statistic, float max, float sum,
                           float* sums);
    // Squared norms of V of all layout.entries slots of a page.
    void (*value_norms)(const PageLayout&, const std::byte* page, float* norms);
    // k.mean + sum of k^2 * half_variance of all slots of a page; mean, half_variance [k_stride].
    void (*expected_logits)(const PageLayout&, const std::byte* page, const float* mean,
                            const float* half_variance, float* logits);
    // q.k of all slots of a page; queries [rows][k_stride], out [rows][out_stride].
    void (*products)(const PageLayout&, const std::byte* page, const float* queries, int rows,
                     float* out, int out_stride);
    // The same of a page that is sketched.
    void (*sketch_products)(const KeySketch&, const std::byte* page, const float* queries, int rows,
                            float* out, int out_stride);
    // log of the sum of e^logit; n >= 1.
    float (*log_sum)(const float* logits, int n);
    // Of n keys of length 1, [dim][kContest], zeros behind them: the largest product of each with a
    // later one, or with zeros.
    void (*newer_cosines)(const float* keys, int n, int dim, float* cosines);
    // What an entry is told by: see FeatureShape. turns: [pair][cosine, sine], which turn the key
    // back to position 0; value is not read where it is a part of the key.
    void (*features)(const FeatureShape&, const float* key, const float* value, const float* turns,
                     float* out);
    // The product of weights [n] with all features but those of the value; and with those.
    float (*predict_key)(const FeatureShape&, const float* weights, const float* key,
                         const float* turns);
    float (*predict_value)(const FeatureShape&, const float* weights, const float* value);
    // sums += the sum over rows [n_rows][stride] of their outer products with themselves, of which
    // the lower triangle is held, row by row; stride: n and zeros up to a multiple of 16.
    void (*add_products)(const float* rows, int n_rows, int stride, int n, double* sums);
};

// All kernels that this machine runs, the slowest first.
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
