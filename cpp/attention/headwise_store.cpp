#include "attention/headwise_store.hpp"

#include <stdexcept>

namespace entropykv {
namespace {

void check_rows(const RowsOfTokens& rows, int n_tokens, int n_head, int dim) {
    if (rows.n_tokens != n_tokens || rows.n_head != n_head || rows.dim != dim)
        throw std::invalid_argument("q, k and v must be [n_tokens][heads][dim]");
}

}  // namespace

const KernelTable& kernels_named(const std::optional<std::string>& name) {
    const auto tables = available_kernels();
    if (!name) return *tables.back();
    for (const KernelTable* table : tables)
        if (*name == table->name) return *table;
    throw std::invalid_argument("this machine has no kernels named " + *name);
}

SequencePool::SequencePool(const std::vector<LayerShape>& layers, KvType type, int max_tokens,
                           int n_sequences, int n_drafts)
    : store(std::make_shared<StorePool>(layers, type, max_tokens, n_sequences, n_drafts)) {}

HeadwiseStore::HeadwiseStore(const std::vector<LayerShape>& layers, const StoreSettings& settings,
                             int n_threads, const std::optional<std::string>& kernels_name,
                             const SequencePool* pool)
    : kernels(kernels_named(kernels_name)),
      store(layers, settings, pool != nullptr ? pool->store : nullptr),
      attention(store, kernels, n_threads, pool != nullptr ? pool->workers : nullptr),
      in_pool_(pool != nullptr) {}

const LayerShape& HeadwiseStore::shape_of(int layer) const {
    if (layer < 0 || layer >= store.n_layers())
        throw std::invalid_argument("layer " + std::to_string(layer) + " of a store of " +
                                    std::to_string(store.n_layers()));
    return store.shape(layer);
}

void HeadwiseStore::check_head(int layer, int head) const {
    const int n = shape_of(layer).n_head_kv;
    if (head < 0 || head >= n)
        throw std::invalid_argument("KV head " + std::to_string(head) + " of a layer of " +
                                    std::to_string(n));
}

void HeadwiseStore::set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                                const Protection& protection) {
    const std::size_t before = store.share().budget_bytes();
    store.set_budgets(budgets, pool_pages, protection);
    if (store.share().budget_bytes() < before) attention.release_scratch();
}

void HeadwiseStore::give_up_share() {
    store.give_up_share();
    attention.release_scratch();
}

void HeadwiseStore::rebase(const std::vector<RopeParams>& ropes, int n_sinks, int old_shift,
                           int new_shift) {
    entropykv::rebase(store, kernels, ropes, n_sinks, old_shift, new_shift);
}

void HeadwiseStore::check_batch(int layer, int reader, const MicroBatch& batch) const {
    const LayerShape& shape = shape_of(layer);
    const int n_tokens = batch.q.n_tokens;
    check_rows(batch.q, n_tokens, shape.n_head, shape.k_dim);
    if (reader < 0 || reader >= shape.readers)
        throw std::invalid_argument("a reader that the layer does not have");
    if (reader > 0 && (layer != last_layer_ || reader != last_reader_ + 1))
        throw std::invalid_argument("readers of a layer attend one after the other");
    if (reader > 0 && n_tokens != attention.step().n_tokens)
        throw std::invalid_argument("readers of a layer attend to the same tokens");
    if (batch.k.has_value() != (reader == 0))
        throw std::invalid_argument("k must be given for the first reader, and for no other");
    if (batch.v.has_value() != (reader == 0 && !shape.latent))
        throw std::invalid_argument("v must be given with k unless it is a part of it");
    if (batch.k) check_rows(*batch.k, n_tokens, shape.n_head_kv, shape.k_dim);
    if (batch.v) check_rows(*batch.v, n_tokens, shape.n_head_kv, shape.v_dim);
    if (batch.n_echo < 0 || batch.n_echo > n_tokens)
        throw std::invalid_argument("an echo of more tokens than there are, or of fewer than none");
}

void HeadwiseStore::attend_alone(int layer, int reader, const MicroBatch& batch,
                                 const AttentionParams& params, float* output) {
    check_batch(layer, reader, batch);
    const int n_text = batch.q.n_tokens - batch.n_echo;
    if (reader == 0)
        attention.begin({n_text, batch.position, batch.position, batch.n_echo, batch.n_drafts});
    if (batch.k) attention.stage_k(layer, batch.k->view, 0, 1);
    if (batch.v) attention.stage_v(layer, batch.v->view, 0, 1);
    attention.attend(layer, reader, params, batch.q.view, output, 0);
    attention.commit_due(0);
    last_layer_ = layer;
    last_reader_ = reader;
}

void HeadwiseStore::track_entropy(bool on) {
    attention.entropies().track(on);
    attention.entropies().reset();
}

std::vector<double> HeadwiseStore::mean_entropies(int layer) const {
    shape_of(layer);
    std::vector<double> means = attention.entropies().sums(layer);
    const auto rows = static_cast<double>(attention.entropies().rows(layer));
    if (rows == 0.0) throw std::invalid_argument("nothing was attended to yet");
    for (double& mean : means) mean /= rows;
    return means;
}

}  // namespace entropykv
