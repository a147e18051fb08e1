// Holds a HeadStore and the attention over it, which is all that one sequence needs.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention.hpp"
#include "store/rope.hpp"

namespace entropykv {

// Returns the kernels with this name, or without a name the fastest that this machine can run.
// Throws std::invalid_argument for an unknown name.
const KernelTable& kernels_named(const std::optional<std::string>& name);

// Holds the pages and the scratch that the sequences of one model share.
struct SequencePool {
    SequencePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens,
                 int n_sequences, int n_drafts = 0);

    // Counts the bytes of the threads' scratch, of the predictor, and of the sums that it is fitted
    // to.
    std::size_t scratch_bytes() const {
        return bytes_of_workers(*workers) + store->prediction_bytes();
    }

    std::shared_ptr<StorePool> store;
    std::shared_ptr<Workers> workers = std::make_shared<Workers>();
};

// Refers to rows of a micro-batch, [n_tokens][n_head][dim].
struct RowsOfTokens {
    RowsView view;
    int n_tokens;
    int n_head;
    int dim;
};

// Holds one sequence, which may belong to a pool. Methods throw std::invalid_argument for layers
// and heads that do not exist.
class HeadwiseStore {
public:
    HeadwiseStore(const std::vector<LayerShape>& layers, const StoreSettings& settings,
                  int n_threads, const std::optional<std::string>& kernels_name,
                  const SequencePool* pool);

    const LayerShape& shape_of(int layer) const;
    void check_head(int layer, int head) const;

    // Sets budgets in entries, and frees scratch that smaller budgets do not need.
    void set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                     const Protection& protection);
    void give_up_share();
    void rebase(const std::vector<RopeParams>& ropes, int n_sinks, int old_shift, int new_shift);

    // Holds a micro-batch that is attended to without a model; its last n_echo tokens are an echo.
    struct MicroBatch {
        RowsOfTokens q;
        std::optional<RowsOfTokens> k;  // given for the first reader of a layer only
        std::optional<RowsOfTokens> v;  // given with k, unless V is a part of K
        int position;
        int n_echo;
        int n_drafts = 0;  // see Attention::begin()
    };
    // Stages K and V for the first reader of a layer, attends, and commits after the last reader.
    // The output is [n_tokens][n_head][v_dim]. With a model, nodes of llama.cpp's graph call
    // AttentionBatch instead. Throws std::invalid_argument for rows of another shape and for
    // readers out of order, and what Attention::begin() throws.
    void attend_alone(int layer, int reader, const MicroBatch& batch, const AttentionParams& params,
                      float* output);

    double eviction_seconds() const {
        return 1e-9 * static_cast<double>(store.components().common.eviction_nanoseconds.load());
    }

    void track_entropy(bool on);
    // Returns the mean entropy in bits of the attention rows of every query head of a layer since
    // track_entropy(true). Throws std::invalid_argument if nothing was attended to.
    std::vector<double> mean_entropies(int layer) const;

    std::size_t scratch_bytes() const {
        return store.components().scratch_bytes() + attention.scratch_bytes() +
               (in_pool_ ? 0 : store.share().pool().prediction_bytes());
    }

    const KernelTable& kernels;
    HeadStore store;
    Attention attention;

private:
    void check_batch(int layer, int reader, const MicroBatch& batch) const;

    bool in_pool_;         // whether other sequences share the pool
    int last_layer_ = -1;  // the last layer that attend_alone() was called for
    int last_reader_ = -1;
};

}  // namespace entropykv
