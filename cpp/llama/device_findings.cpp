// Computes what the host must know of K and V: squared norms, and the products of a prediction.
#include "llama/device_graph.hpp"

namespace entropykv {

void DeviceGraph::add_findings(int n, std::size_t rows_offset) {
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

void DeviceGraph::add_value_squares(int n, std::size_t rows_offset, std::size_t rows_stride,
                                    int n_layers) {
    const std::int64_t of_layer = std::int64_t{layer_.shape().n_head_kv} * n;
    ggml_tensor* rows =
        device_.looked_up_->tensor(context_, GGML_TYPE_I32, rows_offset, of_layer, n_layers);
    ggml_tensor* values = leaf_of(context_, layer_.v());
    ggml_tensor* place = device_.findings_->tensor(
        context_, GGML_TYPE_F32, served_.places.value_squares, 1, of_layer, n_layers);
    if (n_layers > 1) {
        const DeviceAttention::Served& next = device_.layers_[number() + 1];
        rows->nb[1] = rows_stride;
        values->ne[2] = n_layers;
        values->nb[2] = values->nb[1] * static_cast<std::size_t>(next.layer->first_in_memory() -
                                                                 layer_.first_in_memory());
        place->nb[2] = next.places.value_squares - served_.places.value_squares;
    }
    values = ggml_sqr(context_, ggml_get_rows(context_, values, rows));
    ggml_build_forward_expand(graph_, ggml_cpy(context_, ggml_sum_rows(context_, values), place));
}

// Keeps what the host must know of K and V of the tokens: [KV head and token][dim] in f32.
void DeviceGraph::find_out(ggml_tensor* keys, ggml_tensor* values) {
    ggml_tensor* sum = served_.predictor ? product_of_key(keys) : nullptr;
    if (device_.needs_value_squares(served_))
        keep(ggml_sum_rows(context_, ggml_sqr(context_, values)), served_.places.value_squares);
    if (sum == nullptr) return;
    if (served_.predictor.shape.v_dim > 0)
        sum = ggml_add(context_, sum, product(values, served_.places.value_weights));
    keep(sum, served_.places.predictions);
}

// Returns the sum of values, each multiplied by its KV head's weight, [KV head][token].
ggml_tensor* DeviceGraph::product(ggml_tensor* values, std::size_t weights) {
    const int n_head_kv = layer_.shape().n_head_kv;
    ggml_tensor* of_heads =
        device_.predictors_->tensor(context_, GGML_TYPE_F32, weights, values->ne[0], 1, n_head_kv);
    values = ggml_reshape_3d(context_, values, values->ne[0], values->ne[1] / n_head_kv, n_head_kv);
    return ggml_sum_rows(context_, ggml_mul(context_, values, of_heads));
}

// Returns some values of each row of K.
ggml_tensor* DeviceGraph::columns(ggml_tensor* rows, int first, int n) {
    return ggml_view_2d(context_, rows, n, rows->ne[1], rows->nb[1],
                        index_of(first) * sizeof(float));
}

// Returns the products of the features that only the key has, but for the logarithm of its
// norm: the host computes that from the squared norm, which is kept here.
ggml_tensor* DeviceGraph::product_of_key(ggml_tensor* keys) {
    const FeatureShape& shape = served_.predictor.shape;
    ggml_tensor* squares = ggml_sqr(context_, keys);
    keep(ggml_sum_rows(context_, squares), served_.places.key_squares);
    ggml_tensor* turned = keys;
    ggml_tensor* sum = nullptr;
    if (shape.first_pair > 0) {
        turned =
            ggml_cont(context_, columns(keys, shape.first_pair, shape.k_dim - shape.first_pair));
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

ggml_tensor* DeviceGraph::turned_back(ggml_tensor* keys) {
    const DevicePredictor& predictor = served_.predictor;
    ggml_tensor* factors = device_.predictors_->tensor(
        context_, GGML_TYPE_F32, served_.places.factors, predictor.shape.n_pairs);
    return turned_by(context_, keys, turns_, factors, predictor.rope);
}

// Returns the squared norms of the pairs that RoPE rotates, from the squares of K.
ggml_tensor* DeviceGraph::pair_squares(ggml_tensor* squares) {
    const FeatureShape& shape = served_.predictor.shape;
    const int n = shape.n_pairs;
    if (shape.pair_step == 1)
        return ggml_add(context_, columns(squares, shape.first_pair, n),
                        columns(squares, shape.first_pair + n, n));
    ggml_tensor* pairs = ggml_cont(context_, columns(squares, shape.first_pair, 2 * n));
    pairs = ggml_reshape_3d(context_, pairs, 2, n, squares->ne[1]);
    return ggml_reshape_2d(context_, ggml_sum_rows(context_, pairs), n, squares->ne[1]);
}

// Copies a result to the findings of the step.
void DeviceGraph::keep(ggml_tensor* result, std::size_t offset) {
    ggml_tensor* place = device_.findings_->tensor(context_, GGML_TYPE_F32, offset, result->ne[0],
                                                   result->ne[1], result->ne[2], result->ne[3]);
    ggml_build_forward_expand(graph_, ggml_cpy(context_, result, place));
}

}  // namespace entropykv
