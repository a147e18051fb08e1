// Builds ggml graphs of the attention of one layer on its device.
#pragma once

#include <ggml.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "decide/importance.hpp"
#include "llama/device.hpp"
#include "llama/device_attention.hpp"
#include "llama/device_layer.hpp"

namespace entropykv {

// Lets a product be summed up in f32. Releases of llama.cpp have two names for it.
template <typename Tensor>
auto sum_in_f32(Tensor* product, int) -> decltype(ggml_prec_set_acc(product, GGML_PREC_F32)) {
    return ggml_prec_set_acc(product, GGML_PREC_F32);
}
template <typename Tensor>
void sum_in_f32(Tensor* product, long) {
    ggml_mul_mat_set_prec(product, GGML_PREC_F32);
}

// Whole blocks of queries are observed at a time, which have about so many attention weights at
// most.
constexpr int kObservedBlock = 64;
constexpr int kObservedWeights = 1 << 24;

// One node attends for whole blocks of tokens, whose mask has about so many values at most.
constexpr int kPartBlock = 64;
constexpr int kMaskValues = 1 << 23;
// The mask falls by this for each position by which a row is newer than a query: in f16, even one
// position gives -infinity. A power of two keeps the differences exact.
constexpr float kMaskSlope = 131072.0f;
// A group of KV heads has so many nodes at most, which bounds the graph.
constexpr int kMostParts = 16;

inline std::size_t index_of(int i) { return static_cast<std::size_t>(i); }

// Turns rows, each by its own number of positions. Any RoPE is one with base 1, whose frequencies
// are given as factors.
inline ggml_tensor* turned_by(ggml_context* context, ggml_tensor* rows, ggml_tensor* turns,
                              ggml_tensor* factors, const RopeParams& rope) {
    ggml_tensor* turned = ggml_reshape_3d(context, rows, rows->ne[0], 1, rows->ne[1]);
    turned = ggml_rope_ext(context, turned, turns, factors, rope.n_dims,
                           rope.neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL, 0, 1.0f, 1.0f,
                           0.0f, 1.0f, 0.0f, 0.0f);
    return ggml_reshape_2d(context, turned, rows->ne[0], rows->ne[1]);
}

// Builds the operations of one layer, in a graph of ours or in nodes of llama.cpp's graph.
class DeviceGraph {
public:
    // graph: gets the operations; null if they go to llama.cpp's graph. The tensors of `node` may
    // be null if no function needs them.
    DeviceGraph(ggml_context* context, ggml_cgraph* graph, const DeviceAttention& device,
                const DeviceAttention::Served& served, int reader, const DeviceNode& node,
                const DeviceStep& step)
        : context_(context),
          graph_(graph),
          device_(device),
          served_(served),
          layer_(*served.layer),
          importance_(device.importance_),
          reader_(reader),
          first_reader_(reader == 0),
          node_(node),
          step_(step),
          params_(served.params) {
        std::memcpy(&scale_, params_.data(), sizeof scale_);
        std::memcpy(&softcap_, params_.data() + 2, sizeof softcap_);
        params_[1] = 0;  // the mask has the bias of ALiBi
    }

    // Lets operations be those for heads with unlike numbers of entries.
    void treat_as_uneven() { all_uneven_ = true; }

    // Adds the attention of a step between two nodes.
    void add_step() {
        // Tokens of other sequences come before these.
        q_ = leaf_of(context_, node_.q, node_.q->nb[1] * index_of(step_.first));
        output_ = leaf_of(context_, node_.output, node_.output->nb[2] * index_of(step_.first));
        refer_to_rows();
        refer_to_positions();
        if (first_reader_) write_tokens();
        for (const DeviceGroup& group : layer_.groups()) attend(group);
    }

    // Returns an operation that writes K or V of a single token, [n_head_kv * dim] in f32, to the
    // rows of its KV heads.
    ggml_tensor* write_of(bool keys, const ggml_tensor* values) {
        refer_to_rows();
        ggml_tensor* to = keys ? k_ : v_;
        ggml_tensor* from = leaf_of(context_, values);
        from->ne[0] = to->ne[0];
        from->ne[1] = layer_.shape().n_head_kv;
        from->nb[1] = from->nb[0] * index_of(static_cast<int>(to->ne[0]));
        from->nb[2] = from->nb[3] = from->nb[1] * index_of(layer_.shape().n_head_kv);
        return ggml_set_rows(context_, to, from, rows_of_tokens());
    }

    // Returns the operations that attend with a single token, one for every group, whose results
    // lie in the output of the node.
    std::vector<ggml_tensor*> attention_of() {
        q_ = leaf_of(context_, node_.q);
        output_ = leaf_of(context_, node_.output);
        refer_to_rows();
        std::vector<ggml_tensor*> all;
        for (const DeviceGroup& group : layer_.groups()) {
            const std::int64_t width = layer_.position_stride(group);
            ggml_tensor* mask = stored_mask(group);
            if (is_plain(group)) mask->ne[3] = 1;  // that of the first head
            ggml_tensor* attended = attended_by(
                group, rows_of(k_, layer_.shape().k_dim, group, width),
                rows_of(v_ == nullptr ? k_ : v_, layer_.shape().v_dim, group, width), mask, 0, 1);
            attended->buffer = output_->buffer;
            attended->data = static_cast<char*>(output_->data) +
                             output_->nb[1] * index_of(query_heads() * group.first_head);
            all.push_back(attended);
        }
        return all;
    }

    // Returns an operation that keeps the queries of a single token for add_observation().
    ggml_tensor* copy_of_queries() {
        return ggml_cpy(context_, leaf_of(context_, node_.q), kept_queries());
    }

    // Adds what the kept queries of a single token gave to all rows.
    void add_observation() {
        q_ = kept_queries();
        refer_to_rows();
        refer_to_positions();
        for (const DeviceGroup& group : layer_.groups()) {
            const std::int64_t width = layer_.position_stride(group);
            observe(group, rows_of(k_, layer_.shape().k_dim, group, width),
                    positions_of(group, width));
        }
    }

    // Adds what add_step() finds out about K and V of tokens, for n tokens whose rows are given.
    void add_findings(int n, std::size_t rows_offset) {
        refer_to_rows();
        const LayerShape& shape = layer_.shape();
        ggml_tensor* rows = device_.looked_up_->tensor(context_, GGML_TYPE_I32, rows_offset,
                                                       std::int64_t{shape.n_head_kv} * n);
        turns_ = device_.looked_up_->tensor(context_, GGML_TYPE_I32, 0, rows->ne[0]);
        ggml_tensor* keys = ggml_get_rows(context_, k_, rows);
        ggml_tensor* values = v_ != nullptr ? ggml_get_rows(context_, v_, rows)
                                            : ggml_cont(context_, columns(keys, 0, shape.v_dim));
        find_out(keys, values);
    }

private:
    void refer_to_rows() {
        k_ = leaf_of(context_, layer_.k());
        if (!layer_.shape().latent) v_ = leaf_of(context_, layer_.v());
    }

    void refer_to_positions() {
        token_positions_ = of_tokens(device_.token_positions_);
        if (layer_.shape().window > 0) oldest_ = of_tokens(served_.places.oldest);
        positions_ = device_.positions_->tensor(context_, GGML_TYPE_F32, served_.places.positions,
                                                1, layer_.n_positions());
    }

    ggml_tensor* rows_of_tokens() {
        return device_.input_->tensor(context_, GGML_TYPE_I64, served_.places.rows,
                                      std::int64_t{layer_.shape().n_head_kv} * step_.n_tokens);
    }

    // Returns the mask of the single token of this step.
    ggml_tensor* stored_mask(const DeviceGroup& group) {
        const std::size_t first = index_of(first_position(group));
        return device_.masks_->tensor(context_, GGML_TYPE_F16,
                                      served_.places.positions / 2 + sizeof(ggml_fp16_t) * first,
                                      layer_.position_stride(group), 1, 1, group.n_heads);
    }

    ggml_tensor* kept_queries() {
        const LayerShape& shape = layer_.shape();
        const std::size_t of_reader =
            sizeof(float) * index_of(shape.k_dim) * index_of(shape.n_head) * index_of(reader_);
        return device_.queries_->tensor(context_, GGML_TYPE_F32, served_.places.queries + of_reader,
                                        shape.k_dim, 1, shape.n_head);
    }

    ggml_tensor* of_tokens(std::size_t offset) {
        return device_.input_->tensor(context_, GGML_TYPE_F32, offset, 1, step_.n_tokens);
    }

    // Writes K, V and positions of the tokens to their rows, and frees the rows of those that were
    // evicted since the last step.
    void write_tokens() {
        ggml_tensor* rows = rows_of_tokens();
        ggml_tensor* keys = values_of(node_.k_cells);
        ggml_tensor* values = values_of(node_.v_cells);
        if (served_.predictor)
            turns_ = device_.input_->tensor(context_, GGML_TYPE_I32, device_.turns_, keys->ne[1]);
        find_out(keys, values);
        k_ = set_rows(k_, keys, rows);
        if (v_ != nullptr) v_ = set_rows(v_, values, rows);
        const std::int64_t n = served_.places.n_changed;
        if (n == 0) return;  // The host has written all positions.
        positions_ = set_rows(
            positions_,
            device_.input_->tensor(context_, GGML_TYPE_F32, served_.places.new_positions, 1, n),
            device_.input_->tensor(context_, GGML_TYPE_I64, served_.places.changed, n));
    }

    // Keeps what the host must know of K and V of the tokens: [KV head and token][dim] in f32.
    void find_out(ggml_tensor* keys, ggml_tensor* values) {
        ggml_tensor* sum = served_.predictor ? product_of_key(keys) : nullptr;
        if (device_.needs_value_squares(served_))
            keep(ggml_sum_rows(context_, ggml_sqr(context_, values)), served_.places.value_squares);
        if (sum == nullptr) return;
        if (served_.predictor.shape.v_dim > 0)
            sum = ggml_add(context_, sum, product(values, served_.places.value_weights));
        keep(sum, served_.places.sums);
    }

    // Returns the K or V rows of the micro-batch in f32, [KV head and token][dim].
    ggml_tensor* values_of(const ggml_tensor* cells) {
        ggml_tensor* of_tokens = leaf_of(context_, cells, cells->nb[1] * index_of(step_.first));
        of_tokens->ne[1] = step_.n_tokens;
        ggml_tensor* values = ggml_cast(context_, of_tokens, GGML_TYPE_F32);
        return ggml_reshape_2d(context_, values, cells->ne[0], step_.n_tokens * cells->ne[2]);
    }

    // Returns the sum of values, each multiplied by its KV head's weight, [KV head][token].
    ggml_tensor* product(ggml_tensor* values, std::size_t weights) {
        const int n_head_kv = layer_.shape().n_head_kv;
        ggml_tensor* of_heads = device_.predictors_->tensor(context_, GGML_TYPE_F32, weights,
                                                            values->ne[0], 1, n_head_kv);
        values =
            ggml_reshape_3d(context_, values, values->ne[0], values->ne[1] / n_head_kv, n_head_kv);
        return ggml_sum_rows(context_, ggml_mul(context_, values, of_heads));
    }

    // Returns some values of each row of K.
    ggml_tensor* columns(ggml_tensor* rows, int first, int n) {
        return ggml_view_2d(context_, rows, n, rows->ne[1], rows->nb[1],
                            index_of(first) * sizeof(float));
    }

    // Returns the products of the features that only the key has, but for the logarithm of its
    // norm: the host computes that from the squared norm, which is kept here.
    ggml_tensor* product_of_key(ggml_tensor* keys) {
        const FeatureShape& shape = served_.predictor.shape;
        ggml_tensor* squares = ggml_sqr(context_, keys);
        keep(ggml_sum_rows(context_, squares), served_.places.key_squares);
        ggml_tensor* turned = keys;
        ggml_tensor* sum = nullptr;
        if (shape.first_pair > 0) {
            turned = ggml_cont(context_,
                               columns(keys, shape.first_pair, shape.k_dim - shape.first_pair));
            sum = product(ggml_cont(context_, columns(keys, 0, shape.first_pair)),
                          served_.places.first_weights);
        }
        if (shape.n_pairs > 0) turned = turned_back(turned);
        ggml_tensor* of_turned = product(turned, served_.places.turned_weights);
        sum = sum == nullptr ? of_turned : ggml_add(context_, sum, of_turned);
        if (shape.n_pairs == 0) return sum;
        ggml_tensor* norms = ggml_sqrt(context_, pair_squares(squares));
        return ggml_add(context_, sum, product(norms, served_.places.norm_weights));
    }

    // Turns keys back to position 0: see Rotation.
    ggml_tensor* turned_back(ggml_tensor* keys) {
        const DevicePredictor& predictor = served_.predictor;
        ggml_tensor* factors = device_.predictors_->tensor(
            context_, GGML_TYPE_F32, served_.places.factors, predictor.shape.n_pairs);
        return turned_by(context_, keys, turns_, factors, predictor.rope);
    }

    // Returns the squared norms of the pairs that RoPE rotates, from the squares of K.
    ggml_tensor* pair_squares(ggml_tensor* squares) {
        const FeatureShape& shape = served_.predictor.shape;
        const int n = shape.n_pairs;
        if (shape.pair_step == 1)
            return ggml_add(context_, columns(squares, shape.first_pair, n),
                            columns(squares, shape.first_pair + n, n));
        ggml_tensor* pairs = ggml_cont(context_, columns(squares, shape.first_pair, 2 * n));
        pairs = ggml_reshape_3d(context_, pairs, 2, n, squares->ne[1]);
        return ggml_reshape_2d(context_, ggml_sum_rows(context_, pairs), n, squares->ne[1]);
    }

    // Writes rows of a tensor, and returns the tensor as it is afterwards.
    ggml_tensor* set_rows(ggml_tensor* to, ggml_tensor* values, ggml_tensor* rows) {
        ggml_tensor* written = ggml_set_rows(context_, to, values, rows);
        ggml_build_forward_expand(graph_, written);
        return written;
    }

    // Copies a result to the findings of the step.
    void keep(ggml_tensor* result, std::size_t offset) {
        ggml_tensor* place =
            device_.findings_->tensor(context_, GGML_TYPE_F32, offset, result->ne[0], result->ne[1],
                                      result->ne[2], result->ne[3]);
        ggml_build_forward_expand(graph_, ggml_cpy(context_, result, place));
    }

    // Returns positions of rows for every query, [KV head][query][row].
    ggml_tensor* for_queries(ggml_tensor* row_positions, int n) {
        if (n == 1) return row_positions;
        return ggml_repeat_4d(context_, row_positions, row_positions->ne[0], n, 1,
                              row_positions->ne[3]);
    }

    // Returns what the input says of the queries from `first` on.
    ggml_tensor* of_queries(ggml_tensor* input, int first, int n) {
        return ggml_view_2d(context_, input, 1, n, sizeof(float), index_of(first) * sizeof(float));
    }

    // Says which rows are older than a query: numbers of rows and of tokens that are compared.
    struct Order {
        ggml_tensor* rows;    // [KV head][row], or [row] for all heads
        ggml_tensor* tokens;  // [token]
    };

    Order positions_of(const DeviceGroup& group, std::int64_t width) {
        return {by_row(positions_, group, width), token_positions_};
    }

    // Tells whether all heads of a group hide the same rows, and whether those are the last ones:
    // tokens lie in the order of the text behind all entries.
    bool is_plain(const DeviceGroup& group) const {
        return !all_uneven_ && layer_.is_even(group) && layer_.shape().window == 0 &&
               served_.slopes.empty();
    }

    Order order_of(const DeviceGroup& group, std::int64_t width) {
        if (!is_plain(group)) return positions_of(group, width);
        ggml_tensor* rows = device_.row_numbers_->tensor(context_, GGML_TYPE_F32, 0, width);
        ggml_tensor* seen =
            device_.input_->tensor(context_, GGML_TYPE_F32, served_.places.seen_rows, 1,
                                   std::int64_t{step_.n_tokens} * layer_.shape().n_head_kv);
        return {rows, of_queries(seen, step_.n_tokens * group.first_head, step_.n_tokens)};
    }

    // Returns by how much rows are newer than queries, [KV head][query][row].
    ggml_tensor* newer(const Order& order, int first, int n) {
        return ggml_sub(context_, for_queries(order.rows, n), of_queries(order.tokens, first, n));
    }

    // Returns the mask of a group, which hides rows from queries: 0, or ALiBi's bias, for the rows
    // that a query sees, and a large negative number, -infinity in f16, for the others. distance:
    // newer() of the same rows and queries. The mask is [KV head][query head][query][row] with
    // ALiBi, and [KV head][query][row] without.
    ggml_tensor* mask(const DeviceGroup& group, const Order& order, ggml_tensor* distance,
                      int first, int n) {
        ggml_tensor* mask = where_negative(distance, -kMaskSlope);
        if (oldest_ != nullptr) {
            ggml_tensor* after =
                ggml_sub(context_, for_queries(order.rows, n), of_queries(oldest_, first, n));
            mask = ggml_add(context_, mask, where_negative(after, kMaskSlope));
        }
        if (served_.slopes.empty()) return mask;
        const int of_kv = query_heads();
        ggml_tensor* slopes = device_.input_->tensor(context_, GGML_TYPE_F32, served_.places.slopes,
                                                     1, 1, layer_.shape().n_head);
        slopes = ggml_view_4d(context_, slopes, 1, 1, of_kv, group.n_heads, sizeof(float),
                              sizeof(float), index_of(of_kv) * sizeof(float),
                              index_of(of_kv * group.first_head) * sizeof(float));
        ggml_tensor* bias =
            ggml_repeat_4d(context_, distance, distance->ne[0], n, of_kv, group.n_heads);
        return ggml_add(context_, ggml_mul(context_, bias, slopes), mask);
    }

    // Returns values times a slope where that is negative, and 0 elsewhere.
    ggml_tensor* where_negative(ggml_tensor* values, float slope) {
        return ggml_clamp(context_, ggml_scale(context_, values, slope), -1e30f, 0.0f);
    }

    // Returns the first `dim` values of the rows of a group: [KV head][row][dim]. The last rows of
    // a head may be those of the next one, which are masked; ggml only lets views overlap that are
    // changed afterwards.
    ggml_tensor* rows_of(ggml_tensor* all, int dim, const DeviceGroup& group, std::int64_t width) {
        const DeviceHead& head = layer_.heads()[index_of(group.first_head)];
        const std::size_t stride = all->nb[1] * index_of(head.rows());
        ggml_tensor* rows = ggml_view_4d(
            context_, all, dim, std::min<std::int64_t>(width, head.rows()), 1, group.n_heads,
            all->nb[1], stride, stride, all->nb[1] * index_of(head.first_row));
        rows->ne[1] = width;
        return rows;
    }

    // Returns a group's part of a tensor with a value for every position, [KV head][row].
    ggml_tensor* by_row(ggml_tensor* all, const DeviceGroup& group, std::int64_t width) {
        const std::size_t stride = sizeof(float) * index_of(layer_.position_stride(group));
        return ggml_view_4d(context_, all, width, 1, 1, group.n_heads, stride, stride, stride,
                            sizeof(float) * index_of(first_position(group)));
    }

    int first_position(const DeviceGroup& group) const {
        return layer_.heads()[index_of(group.first_head)].first_position;
    }

    int query_heads() const { return layer_.shape().n_head / layer_.shape().n_head_kv; }

    // Returns the queries of a group: [KV head][query head of the KV head][token][k_dim].
    ggml_tensor* queries_of(const DeviceGroup& group, int first, int n) {
        const int of_kv = query_heads();
        return ggml_view_4d(
            context_, q_, q_->ne[0], n, of_kv, group.n_heads, q_->nb[1], q_->nb[2],
            q_->nb[2] * index_of(of_kv),
            q_->nb[1] * index_of(first) + q_->nb[2] * index_of(of_kv * group.first_head));
    }

    // Returns the sinks of a group's query heads, or null.
    ggml_tensor* sinks_of(const DeviceGroup& group) {
        if (node_.sinks == nullptr) return nullptr;
        return ggml_view_1d(context_, leaf_of(context_, node_.sinks), query_heads(),
                            sizeof(float) * index_of(query_heads() * group.first_head));
    }

    // Returns how many tokens attend to a group in one node: whole blocks, so few that the mask is
    // small, but not so few that there are more than kMostParts nodes.
    int tokens_of_part(const DeviceGroup& group, int width) const {
        const int small = kMaskValues / (width * (is_plain(group) ? 1 : group.n_heads));
        const int least = (step_.n_tokens + kMostParts - 1) / kMostParts;
        const int whole = std::max(small, least + kPartBlock - 1) / kPartBlock * kPartBlock;
        return std::max(whole, kPartBlock);
    }

    void attend(const DeviceGroup& group) {
        const int width = layer_.width_of(group, step_.n_tokens);
        const Order order = order_of(group, width);
        ggml_tensor* keys = rows_of(k_, layer_.shape().k_dim, group, width);
        ggml_tensor* values = rows_of(v_ == nullptr ? k_ : v_, layer_.shape().v_dim, group, width);
        const int n = tokens_of_part(group, width);
        for (int first = 0; first < step_.n_tokens; first += n)
            attend_part(group, keys, values, order, first, std::min(n, step_.n_tokens - first));
        if (step_.observing) observe(group, keys, order);
    }

    // Heads that hide the same rows have one mask and attend as llama.cpp's do, for which backends
    // have their fastest kernels; otherwise each KV head is one index of the fourth dimension.
    ggml_tensor* attended_by(const DeviceGroup& group, ggml_tensor* keys, ggml_tensor* values,
                             ggml_tensor* mask, int first, int n) {
        ggml_tensor* queries = queries_of(group, first, n);
        if (is_plain(group)) {
            queries = with_heads_third(queries);
            keys = with_heads_third(keys);
            values = with_heads_third(values);
        }
        ggml_tensor* attended =
            ggml_flash_attn_ext(context_, queries, keys, values, mask, scale_, 0.0f, softcap_);
        std::memcpy(attended->op_params, params_.data(), sizeof attended->op_params);
        if (ggml_tensor* sinks = sinks_of(group)) ggml_flash_attn_ext_add_sinks(attended, sinks);
        return attended;
    }

    // Makes one dimension of the last two, whose indices lie evenly apart.
    ggml_tensor* with_heads_third(const ggml_tensor* tensor) {
        ggml_tensor* merged = leaf_of(context_, tensor);
        // A view in a graph that is not placed yet has no buffer.
        if (tensor->view_src != nullptr) merged->buffer = tensor->view_src->buffer;
        merged->ne[2] = tensor->ne[2] * tensor->ne[3];
        merged->ne[3] = 1;
        if (tensor->ne[2] == 1) merged->nb[2] = tensor->nb[3];
        merged->nb[3] = merged->nb[2] * static_cast<std::size_t>(merged->ne[2]);
        return merged;
    }

    // Computes the outputs of n tokens from `first` on.
    void attend_part(const DeviceGroup& group, ggml_tensor* keys, ggml_tensor* values,
                     const Order& order, int first, int n) {
        ggml_tensor* mask_of_part = ggml_cast(
            context_, mask(group, order, newer(order, first, n), first, n), GGML_TYPE_F16);
        ggml_tensor* attended = attended_by(group, keys, values, mask_of_part, first, n);
        const int of_kv = query_heads();
        const std::size_t head_bytes = output_->nb[1];
        const std::size_t offset =
            head_bytes * index_of(of_kv * group.first_head) + output_->nb[2] * index_of(first);
        ggml_tensor* place = nullptr;
        if (is_plain(group)) {
            place = ggml_view_3d(context_, output_, output_->ne[0], of_kv * group.n_heads, n,
                                 head_bytes, output_->nb[2], offset);
        } else {
            place = ggml_view_4d(context_, output_, output_->ne[0], of_kv, n, group.n_heads,
                                 head_bytes, output_->nb[2], head_bytes * index_of(of_kv), offset);
        }
        ggml_build_forward_expand(graph_, ggml_cpy(context_, attended, place));
    }

    // Sums up what the queries of the observation window gave to each row.
    void observe(const DeviceGroup& group, ggml_tensor* keys, const Order& order) {
        ggml_tensor* sums = nullptr;
        const int n = step_.n_tokens;
        const std::int64_t width = keys->ne[1];
        const int of_token = static_cast<int>(width) * query_heads() * group.n_heads;
        const int at_once =
            std::max(1, kObservedWeights / of_token / kObservedBlock) * kObservedBlock;
        const int begin = std::max(0, n - importance_.observation_window);
        // Each product in f32 would make keys f32 again.
        if (n - begin > at_once) keys = ggml_cast(context_, keys, GGML_TYPE_F32);
        for (int first = begin; first < n; first += at_once) {
            ggml_tensor* given = given_by(group, keys, order, first, std::min(at_once, n - first));
            sums = sums == nullptr ? given : ggml_add(context_, sums, given);
            // The weights of a block give way to those of the next one.
            ggml_build_forward_expand(graph_, sums);
        }
        ggml_tensor* all = device_.findings_->tensor(context_, GGML_TYPE_F32,
                                                     served_.places.observed, layer_.n_positions());
        ggml_tensor* place = by_row(all, group, sums->ne[0]);
        sums = ggml_reshape_4d(context_, sums, sums->ne[0], 1, 1, group.n_heads);
        if (!first_reader_) sums = ggml_add(context_, sums, place);
        ggml_build_forward_expand(graph_, ggml_cpy(context_, sums, place));
    }

    ggml_tensor* given_by(const DeviceGroup& group, ggml_tensor* keys, const Order& order,
                          int first, int n) {
        ggml_tensor* products =
            ggml_mul_mat(context_, keys, ggml_cont(context_, queries_of(group, first, n)));
        sum_in_f32(products, 0);
        float scale = scale_;
        if (softcap_ != 0.0f) {
            products = ggml_tanh(context_, ggml_scale(context_, products, scale_ / softcap_));
            products = ggml_scale(context_, products, softcap_);
            scale = 1.0f;
        }
        ggml_tensor* mask_of_queries = step_.in_graph
                                           ? stored_mask(group)
                                           : mask(group, order, newer(order, first, n), first, n);
        ggml_tensor* given = ggml_soft_max_ext(context_, products, mask_of_queries, scale, 0.0f);
        if (ggml_tensor* sinks = sinks_of(group)) ggml_soft_max_add_sinks(given, sinks);
        if (importance_.measure().statistic == Statistic::squared_probability)
            given = ggml_sqr(context_, given);
        // The host leaves out the neighbourhood of a single token.
        if (step_.in_graph) return sum_over_queries(given, 0, given->ne[0]);
        return sum_without_neighbours(group, given, order, first, n);
    }

    // Sums up what queries gave to rows outside of their neighbourhood.
    ggml_tensor* sum_without_neighbours(const DeviceGroup& group, ggml_tensor* given,
                                        const Order& order, int first, int n) {
        // 1 for rows outside of the query's neighbourhood, and 0 for the others.
        const auto outside = [&](const Order& of) {
            ggml_tensor* older =
                ggml_scale_bias(context_, newer(of, first, n), -1.0f, 1.0f - kNeighbourhood);
            return ggml_clamp(context_, older, 0.0f, 1.0f);
        };
        const std::int64_t count = layer_.heads()[index_of(group.first_head)].count;
        const std::int64_t used = is_plain(group) ? count + step_.n_tokens : given->ne[0];
        if (!is_plain(group) || first < kNeighbourhood) {
            given = ggml_mul(context_, given, outside(positions_of(group, given->ne[0])));
            return sum_over_queries(given, 0, used);
        }
        // Entries from before the micro-batch are no neighbours of its later queries.
        ggml_tensor* rows = device_.row_numbers_->tensor(context_, GGML_TYPE_F32, 0, given->ne[0]);
        rows = ggml_view_1d(context_, rows, step_.n_tokens,
                            sizeof(float) * static_cast<std::size_t>(count));
        ggml_tensor* of_tokens = ggml_mul(context_, rows_of_given(given, count, step_.n_tokens),
                                          outside({rows, order.tokens}));
        ggml_tensor* sums = sum_over_queries(of_tokens, 0, step_.n_tokens);
        if (count == 0) return sums;
        return ggml_concat(context_, sum_over_queries(given, 0, count), sums, 0);
    }

    // Returns some rows of what is [KV head][query head][token][row].
    ggml_tensor* rows_of_given(ggml_tensor* given, std::int64_t first, std::int64_t n) {
        return ggml_view_4d(context_, given, n, given->ne[1], given->ne[2], given->ne[3],
                            given->nb[1], given->nb[2], given->nb[3],
                            sizeof(float) * static_cast<std::size_t>(first));
    }

    // Returns sums of some rows, [KV head][row].
    ggml_tensor* sum_over_queries(ggml_tensor* given, std::int64_t first, std::int64_t n) {
        const std::int64_t n_queries = given->ne[1] * given->ne[2];
        ggml_tensor* rows = rows_of_given(given, first, n);
        if (device_.ones_ == nullptr) {
            rows = ggml_cont(context_, ggml_permute(context_, rows, 2, 0, 1, 3));
            rows = ggml_reshape_3d(context_, rows, n_queries, n, given->ne[3]);
            return ggml_reshape_3d(context_, ggml_sum_rows(context_, rows), n, 1, given->ne[3]);
        }
        rows =
            ggml_view_3d(context_, rows, n, n_queries, given->ne[3], given->nb[1], given->nb[3], 0);
        ggml_tensor* ones =
            device_.ones_->tensor(context_, GGML_TYPE_F32, 0, 1, n_queries, given->ne[3]);
        return ggml_out_prod(context_, rows, ones);
    }

    ggml_context* context_;
    ggml_cgraph* graph_;
    const DeviceAttention& device_;
    const DeviceAttention::Served& served_;
    const DeviceLayer& layer_;
    const ImportanceSettings& importance_;
    bool all_uneven_ = false;
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
    ggml_tensor* turns_ = nullptr;  // by how many positions keys are turned back
    ggml_tensor* token_positions_ = nullptr;
    ggml_tensor* oldest_ = nullptr;  // null: queries see everything before them
    ggml_tensor* positions_ = nullptr;
};
}  // namespace entropykv
