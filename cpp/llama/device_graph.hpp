// Builds ggml graphs of the attention of one layer on its device. DeviceGraph is in three files:
// device_graph.cpp writes K and V, and attends; device_findings.cpp has what the device finds out
// about K and V, and device_observation.cpp what queries give to entries.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/importance.hpp"
#include "decide/rope_params.hpp"
#include "llama/device.hpp"
#include "llama/device_attention.hpp"
#include "llama/device_layer.hpp"

namespace entropykv {

// The mask falls by this for each position by which a row is newer than a query: in f16, even one
// position gives -infinity. A power of two keeps the differences exact.
constexpr float kMaskSlope = 131072.0f;

inline std::size_t index_of(int i) { return static_cast<std::size_t>(i); }

// Returns the factors of the pairs' frequencies with which a RoPE of base 1 rotates as `rope` does.
std::vector<float> rope_factors(const RopeParams& rope);
// Turns rows, each by its own number of positions, with the factors of their RoPE.
ggml_tensor* turned_by(ggml_context* context, ggml_tensor* rows, ggml_tensor* turns,
                       ggml_tensor* factors, const RopeParams& rope);

// Builds the operations of one layer, in a graph of ours or in nodes of llama.cpp's graph.
class DeviceGraph {
public:
    // graph: gets the operations; null if they go to llama.cpp's graph. The tensors of `node` may
    // be null if no function needs them.
    DeviceGraph(ggml_context* context, ggml_cgraph* graph, const DeviceAttention& device,
                const DeviceAttention::Served& served, int reader, const DeviceNode& node,
                const DeviceStep& step);

    // Treats heads as having different numbers of entries, even if all have equally many.
    void treat_as_uneven() { all_uneven_ = true; }

    // Adds the attention of a step between two nodes.
    void add_step();

    // Adds the mask of all heads of the layer, which are alike.
    void add_mask();
    void add_positions();

    // Returns an operation that writes K or V of the tokens, [token][n_head_kv * dim] in f32, to
    // the rows of their KV heads.
    ggml_tensor* write_of(bool keys, const ggml_tensor* values);

    // Returns the operations that attend, one for every group, whose results lie in the output of
    // the node. n_sequences: how many sequences attend, with a single token each, in the same
    // operation: this one and those in the next places.
    std::vector<ggml_tensor*> attention_of(int n_sequences);

    // Returns an operation that keeps the observed queries for add_observation().
    ggml_tensor* copy_of_queries();

    // Adds operations that add up what the kept queries gave to every row: those of several tokens,
    // or that of a single one in n_layers layers, this one and the next ones, which lie evenly
    // apart.
    void add_observation();
    void add_observation_of_single(int n_layers);

    // Adds what add_step() finds out about K and V of tokens, for n tokens whose rows are given.
    void add_findings(int n, std::size_t rows_offset);
    // Adds the squared norms of V of n tokens whose rows are given, in this layer and the next
    // ones, n_layers in all, which lie evenly apart. rows_stride: from the offset of the rows of a
    // layer to the next one.
    void add_value_squares(int n, std::size_t rows_offset, std::size_t rows_stride, int n_layers);

private:
    // Says which rows are older than a query: numbers of rows and of tokens that are compared.
    struct Order {
        ggml_tensor* rows;    // [KV head][row], or [row] for all heads
        ggml_tensor* tokens;  // [token]
    };

    void refer_to_rows();
    void refer_to_positions();
    ggml_tensor* rows_of_tokens();
    ggml_tensor* stored_mask(const DeviceGroup& group);
    ggml_tensor* mask_of_alike(std::int64_t width);
    ggml_tensor* mask_of_alike(std::int64_t width, int first, int n);
    ggml_tensor* mask_of_observed(const DeviceGroup& group, const Order& order, int first, int n);
    int n_kept_queries() const { return device_.observed_of(step_.n_tokens); }
    ggml_tensor* kept_queries();
    ggml_tensor* queries_of_singles();
    ggml_tensor* of_tokens(std::size_t offset);
    void write_tokens();
    void find_out(ggml_tensor* keys, ggml_tensor* values);
    ggml_tensor* values_of(const ggml_tensor* cells);
    ggml_tensor* product(ggml_tensor* values, std::size_t weights);
    ggml_tensor* columns(ggml_tensor* rows, int first, int n);
    ggml_tensor* product_of_key(ggml_tensor* keys);
    ggml_tensor* turned_back(ggml_tensor* keys);
    ggml_tensor* pair_squares(ggml_tensor* squares);
    ggml_tensor* set_rows(ggml_tensor* to, ggml_tensor* values, ggml_tensor* rows);
    void keep(ggml_tensor* result, std::size_t offset);
    ggml_tensor* for_queries(ggml_tensor* row_positions, int n);
    ggml_tensor* of_queries(ggml_tensor* input, int first, int n);

    Order positions_of(const DeviceGroup& group, std::int64_t width);
    bool is_plain(const DeviceGroup& group) const;
    Order order_of(const DeviceGroup& group, std::int64_t width);
    ggml_tensor* newer(const Order& order, int first, int n);
    ggml_tensor* mask(const DeviceGroup& group, const Order& order, ggml_tensor* distance,
                      int first, int n);
    ggml_tensor* where_negative(ggml_tensor* values, float slope);
    ggml_tensor* rows_of(ggml_tensor* all, int dim, const DeviceGroup& group, std::int64_t width);
    ggml_tensor* by_row(ggml_tensor* all, const DeviceGroup& group, std::int64_t width);
    int first_position(const DeviceGroup& group) const {
        return layer_.heads()[index_of(group.first_head)].first_position;
    }
    int query_heads() const { return layer_.shape().n_head / layer_.shape().n_head_kv; }
    // Returns the size of the fourth dimension of attention: a group's KV heads of all sequences.
    int n_indices(const DeviceGroup& group) const { return group.n_heads * n_sequences_; }
    // Returns how many tokens of llama.cpp's node are written to rows.
    int n_written() const { return step_.n_tokens * step_.n_together; }
    std::size_t number() const {
        return static_cast<std::size_t>(&served_ - device_.layers_.data());
    }
    ggml_tensor* queries_of(const DeviceGroup& group, int first, int n);
    ggml_tensor* sinks_of(const DeviceGroup& group);
    int tokens_of_part(const DeviceGroup& group, int width) const;
    void attend(const DeviceGroup& group);
    ggml_tensor* attended_by(const DeviceGroup& group, ggml_tensor* keys, ggml_tensor* values,
                             ggml_tensor* mask, int first, int n);
    ggml_tensor* aligned(ggml_tensor* tensor);
    ggml_tensor* with_heads_third(const ggml_tensor* tensor);
    void attend_part(const DeviceGroup& group, ggml_tensor* keys, ggml_tensor* values,
                     const Order& order, int first, int n);
    void observe(const DeviceGroup& group, ggml_tensor* keys, const Order& order);
    void observe_single(const DeviceGroup& group, int n_layers);
    ggml_tensor* without_rows_near(const DeviceGroup& group, ggml_tensor* given, int n_layers);
    ggml_tensor* sums_of(const DeviceGroup& group, std::int64_t width, int n_layers);
    ggml_tensor* masks_of_layers(const DeviceGroup& group, int n_layers);
    ggml_tensor* shares_of(const DeviceGroup& group, ggml_tensor* products, ggml_tensor* mask);
    ggml_tensor* keys_in_f32(const DeviceGroup& group, std::int64_t width);
    ggml_tensor* given_by(const DeviceGroup& group, ggml_tensor* keys, const Order& order,
                          int first, int n);
    ggml_tensor* sum_without_neighbours(const DeviceGroup& group, ggml_tensor* given, int first,
                                        int n);
    ggml_tensor* rows_of_given(ggml_tensor* given, std::int64_t first, std::int64_t n);
    ggml_tensor* sum_over_queries(ggml_tensor* given, std::int64_t n);

    ggml_context* context_;
    ggml_cgraph* graph_;
    const DeviceAttention& device_;
    const DeviceAttention::Served& served_;
    const DeviceLayer& layer_;
    const ImportanceSettings& importance_;
    bool all_uneven_ = false;
    int n_sequences_ = 1;  // the sequences that attend in one operation
    int reader_;
    bool first_reader_;
    const DeviceNode node_;
    const DeviceStep& step_;
    DeviceParams params_;
    float scale_ = 1.0f;
    float softcap_ = 0.0f;
    ggml_tensor* q_ = nullptr;
    ggml_tensor* output_ = nullptr;
    ggml_tensor* k_ = nullptr;
    ggml_tensor* v_ = nullptr;      // null: V is a part of K
    int first_query_ = 0;           // the first query that q_ has
    ggml_tensor* turns_ = nullptr;  // by how many positions keys are turned back
    ggml_tensor* token_positions_ = nullptr;
    ggml_tensor* oldest_ = nullptr;  // null: queries see all earlier positions
    ggml_tensor* positions_ = nullptr;
};

}  // namespace entropykv
