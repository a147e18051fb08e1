// A HeadStore with the attention over it: what a sequence is for those who drive it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention.hpp"
#include "store/rope.hpp"

namespace entropykv {

// The kernels of a name, or the fastest that this machine runs. Throws std::invalid_argument.
const KernelTable& kernels_named(const std::optional<std::string>& name);

// What sequences of one model share.
struct SequencePool {
    SequencePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens,
                 int n_sequences);

    // Of the threads that attend, of what predicts scores, and of what that is fitted to.
    std::size_t scratch_bytes() const {
        return bytes_of_workers(*workers) + store->prediction_bytes();
    }

    std::shared_ptr<StorePool> store;
    std::shared_ptr<Workers> workers = std::make_shared<Workers>();
};

// Rows of a micro-batch, [n_tokens][n_head][dim].
struct RowsOfTokens {
    RowsView view;
    int n_tokens;
    int n_head;
    int dim;
};

// One of the sequences of a pool, if there is one. Layers and heads that are not there are refused:
// std::invalid_argument.
class Headwise {
public:
    Headwise(const std::vector<LayerShape>& layers, const StoreSettings& settings, int n_threads,
             const std::optional<std::string>& kernels_name, const SequencePool* pool);

    const LayerShape& shape_of(int layer) const;
    void check_head(int layer, int head) const;

    // Budgets in entries; what threads work with shrinks with them.
    void set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                     const Protection& protection);
    void give_up_share();
    void rebase(const std::vector<RopeParams>& ropes, int n_sinks, int old_shift, int new_shift);

    // One micro-batch without a model, whose last n_echo tokens are an echo.
    struct MicroBatch {
        RowsOfTokens q;
        std::optional<RowsOfTokens> k;  // for the first reader of a layer, and no other
        std::optional<RowsOfTokens> v;  // with k, unless it is a part of it
        int position;
        int n_echo;
    };
    // Stages K and V for the first reader of a layer, attends, commits after the last one; output
    // [n_tokens][n_head][v_dim].
    void attend(int layer, int reader, const MicroBatch& batch, const AttentionParams& params,
                float* output);

    double eviction_seconds() const {
        return 1e-9 * static_cast<double>(store.parts().common.eviction_nanoseconds.load());
    }

    void track_entropy(bool on);
    // Of the attention rows of every query head of a layer since then, in bits.
    std::vector<double> mean_entropies(int layer) const;

    std::size_t scratch_bytes() const {
        return store.parts().scratch_bytes() + attention.scratch_bytes() +
               (in_pool_ ? 0 : store.share().pool().prediction_bytes());
    }

    const KernelTable& kernels;
    HeadStore store;
    Attention attention;

private:
    void check_batch(int layer, int reader, const MicroBatch& batch) const;

    bool in_pool_;         // of others, too
    int last_layer_ = -1;  // that attend() was called for
    int last_reader_ = -1;
};

}  // namespace entropykv
