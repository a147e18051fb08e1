// Sums up the shares of attention that queries give to the rows of their KV heads.
#include <algorithm>

#include "llama/device_graph.hpp"

namespace entropykv {
namespace {

// Makes a product be summed up in f32. Releases of llama.cpp have two names for the function.
template <typename Tensor>
auto sum_in_f32(Tensor* product, int) -> decltype(ggml_prec_set_acc(product, GGML_PREC_F32)) {
    return ggml_prec_set_acc(product, GGML_PREC_F32);
}
template <typename Tensor>
void sum_in_f32(Tensor* product, long) {
    ggml_mul_mat_set_prec(product, GGML_PREC_F32);
}

}  // namespace

ggml_tensor* DeviceGraph::copy_of_queries() {
    const int n = n_kept_queries();
    if (step_.n_tokens == 1)
        return ggml_cpy(context_, leaf_of(context_, node_.q), queries_of_singles());
    ggml_tensor* last = leaf_of(context_, node_.q, node_.q->nb[1] * index_of(step_.n_tokens - n));
    last->ne[1] = n;
    return ggml_cpy(context_, last, kept_queries());
}

void DeviceGraph::add_observation() {
    q_ = kept_queries();
    first_query_ = step_.n_tokens - n_kept_queries();
    refer_to_rows();
    refer_to_positions();
    for (const DeviceGroup& group : layer_.groups()) {
        const std::int64_t width = layer_.width_of(group, step_.n_tokens);
        observe(group, rows_of(k_, layer_.shape().k_dim, group, width), order_of(group, width));
    }
}

void DeviceGraph::add_observation_of_single(int n_layers) {
    refer_to_rows();
    for (const DeviceGroup& group : layer_.groups()) observe_single(group, n_layers);
}

// Adds to the sums what the query of a single token gave to each row of a group in each of n
// layers, [layer][KV head][row], on behalf of all tokens since the last one that was observed.
void DeviceGraph::observe_single(const DeviceGroup& group, int n_layers) {
    const std::int64_t width = layer_.position_stride(group);
    const std::int64_t n_heads = std::int64_t{group.n_heads} * n_layers;
    const std::int64_t of_kv = query_heads();
    const std::size_t next = number() + (n_layers > 1 ? 1 : 0);  // the next layer
    ggml_tensor* keys = rows_of(k_, layer_.shape().k_dim, group, width);
    keys->ne[2] = group.n_heads;
    keys->ne[3] = n_layers;
    if (n_layers > 1)
        keys->nb[3] =
            keys->nb[1] * static_cast<std::size_t>(device_.layers_[next].layer->first_in_memory() -
                                                   layer_.first_in_memory());
    ggml_tensor* queries = queries_of_singles();
    queries = ggml_view_4d(
        context_, queries, queries->ne[0], of_kv, group.n_heads, 1, queries->nb[2],
        queries->nb[2] * index_of(query_heads()),
        device_.singles_->layers[next].queries - device_.singles_->layers[number()].queries,
        queries->nb[1] * index_of(step_.first) +
            queries->nb[2] * index_of(query_heads() * group.first_head));
    queries->ne[3] = n_layers;
    ggml_tensor* products = ggml_mul_mat(context_, keys, ggml_cont(context_, queries));
    sum_in_f32(products, 0);
    products = ggml_reshape_4d(context_, products, width, 1, of_kv, n_heads);
    ggml_tensor* given = shares_of(group, products, masks_of_layers(group, n_layers));
    ggml_tensor* sums = sum_over_queries(given, width);
    sums = without_rows_near(group, sums, n_layers);
    sums = ggml_scale(context_, sums, static_cast<float>(kScoringInterval));
    ggml_tensor* all = sums_of(group, width, n_layers);
    ggml_build_forward_expand(graph_, ggml_cpy(context_, ggml_add(context_, sums, all), all));
}

// Returns what a single token gave to each row, [layer][KV head][row], and 0 for rows in its
// neighbourhood.
ggml_tensor* DeviceGraph::without_rows_near(const DeviceGroup& group, ggml_tensor* given,
                                            int n_layers) {
    const std::int64_t width = given->ne[0];
    const DeviceMemory& input = *device_.looked_up_;
    const std::size_t of_layer = device_.rows_near_[number()];
    ggml_tensor* near =
        input.tensor(context_, GGML_TYPE_I64,
                     of_layer + sizeof(std::int64_t) * index_of(kNeighbourhood * group.first_head),
                     kNeighbourhood, group.n_heads, n_layers);
    if (n_layers > 1) near->nb[2] = device_.rows_near_[number() + 1] - of_layer;
    ggml_tensor* zeros = input.tensor(context_, GGML_TYPE_F32, device_.zeros_, 1, kNeighbourhood,
                                      group.n_heads, n_layers);
    given = ggml_reshape_4d(context_, given, 1, width, group.n_heads, n_layers);
    given = ggml_set_rows(context_, given, zeros, near);
    return ggml_reshape_3d(context_, given, width, group.n_heads, n_layers);
}

// Returns the sums of the first rows of a group in n layers, for one more query.
ggml_tensor* DeviceGraph::sums_of(const DeviceGroup& group, std::int64_t width, int n_layers) {
    const DeviceHead& first = layer_.heads()[index_of(group.first_head)];
    const std::size_t at = served_.places.sums + sizeof(float) * index_of(first.first_sum);
    ggml_tensor* all = device_.sums_->tensor(context_, GGML_TYPE_F32, at, layer_.sum_stride(group),
                                             group.n_heads, n_layers);
    if (n_layers > 1) all->nb[2] = device_.layers_[number() + 1].places.sums - served_.places.sums;
    // The first query begins with zeros, also where sums of queries that are not numbers were.
    if (first_reader_ && device_.n_summed_ == 1)
        all = ggml_cpy(context_, ggml_clamp(context_, all, 0.0f, 0.0f), all);
    else if (first_reader_)
        all = ggml_scale_inplace(context_, all, decay_factor(importance_.decay, kScoringInterval));
    return ggml_view_3d(context_, all, width, group.n_heads, n_layers, all->nb[1], all->nb[2], 0);
}

// Returns the masks of a single token in n layers, [layer and KV head][row].
ggml_tensor* DeviceGraph::masks_of_layers(const DeviceGroup& group, int n_layers) {
    ggml_tensor* mask = stored_mask(group);
    if (n_layers == 1) return mask;
    const std::vector<SingleSteps::Layer>& layers = device_.singles_->layers;
    const std::int64_t of_layer = mask->ne[0] * group.n_heads;
    mask->ne[0] = of_layer;
    mask->ne[1] = n_layers;
    mask->ne[3] = 1;
    mask->nb[1] = layers[number() + 1].mask - layers[number()].mask;
    mask->nb[2] = mask->nb[3] = mask->nb[1] * index_of(n_layers);
    if (!ggml_is_contiguous(mask)) mask = ggml_cont(context_, mask);
    return ggml_reshape_4d(context_, mask, of_layer / group.n_heads, 1, 1,
                           std::int64_t{group.n_heads} * n_layers);
}

ggml_tensor* DeviceGraph::kept_queries() {
    const LayerShape& shape = layer_.shape();
    const std::size_t of_reader = device_.query_bytes(served_, n_kept_queries()) /
                                  index_of(shape.readers) * index_of(reader_);
    return device_.queries_->tensor(context_, GGML_TYPE_F32, served_.places.queries + of_reader,
                                    shape.k_dim, n_kept_queries(), shape.n_head);
}

ggml_tensor* DeviceGraph::queries_of_singles() {
    const LayerShape& shape = layer_.shape();
    const std::size_t of_reader = device_.query_bytes(served_, layer_.n_places()) /
                                  index_of(shape.readers) * index_of(reader_);
    const SingleSteps& singles = *device_.singles_;
    return singles.queries->tensor(context_, GGML_TYPE_F32,
                                   singles.layers[number()].queries + of_reader, shape.k_dim,
                                   step_.n_together, shape.n_head);
}

// Sums up what the queries of the observation window gave to each row.
void DeviceGraph::observe(const DeviceGroup& group, ggml_tensor* keys, const Order& order) {
    const int n = n_kept_queries();
    if (n > 1) keys = keys_in_f32(group, keys->ne[1]);
    ggml_tensor* sums = given_by(group, keys, order, step_.n_tokens - n, n);
    ggml_tensor* all = device_.findings_->tensor(context_, GGML_TYPE_F32, served_.places.observed,
                                                 layer_.n_positions());
    ggml_tensor* place = by_row(all, group, sums->ne[0]);
    sums = ggml_reshape_4d(context_, sums, sums->ne[0], 1, 1, group.n_heads);
    if (!first_reader_) sums = ggml_add(context_, sums, place);
    ggml_build_forward_expand(graph_, ggml_cpy(context_, sums, place));
}

// Returns rows_of() of K in f32. All rows are converted in the order of memory, for which devices
// have much faster kernels.
ggml_tensor* DeviceGraph::keys_in_f32(const DeviceGroup& group, std::int64_t width) {
    const DeviceHead& head = layer_.heads()[index_of(group.first_head)];
    ggml_tensor* rows = ggml_view_2d(context_, k_, layer_.shape().k_dim, head.rows(), k_->nb[1],
                                     k_->nb[1] * index_of(head.first_row));
    rows->ne[1] = std::int64_t{head.rows()} * (group.n_heads - 1) + width;
    rows = ggml_cast(context_, rows, GGML_TYPE_F32);
    const std::size_t stride = rows->nb[1] * index_of(head.rows());
    // As in rows_of(), a view may not overlap itself before it is changed.
    ggml_tensor* keys =
        ggml_view_4d(context_, rows, rows->ne[0], std::min<std::int64_t>(width, head.rows()), 1,
                     group.n_heads, rows->nb[1], stride, stride, 0);
    keys->ne[1] = width;
    return keys;
}

ggml_tensor* DeviceGraph::given_by(const DeviceGroup& group, ggml_tensor* keys, const Order& order,
                                   int first, int n) {
    ggml_tensor* queries = queries_of(group, first, n);
    if (!ggml_is_contiguous(queries)) queries = ggml_cont(context_, queries);
    // The query heads of a KV head are columns of one product, so that its keys are read once.
    const std::int64_t of_kv = query_heads();
    queries = ggml_reshape_4d(context_, queries, queries->ne[0], n * of_kv, 1, group.n_heads);
    ggml_tensor* products = ggml_mul_mat(context_, keys, queries);
    sum_in_f32(products, 0);
    products = ggml_reshape_4d(context_, products, products->ne[0], n, of_kv, group.n_heads);
    ggml_tensor* given = shares_of(group, products, mask_of_observed(group, order, first, n));
    return sum_without_neighbours(group, given, first, n);
}

// Returns what queries give to rows, or its squares, from products of queries and keys, which are
// [KV head][query head][token][row].
ggml_tensor* DeviceGraph::shares_of(const DeviceGroup& group, ggml_tensor* products,
                                    ggml_tensor* mask) {
    float scale = scale_;
    if (softcap_ != 0.0f) {
        products = ggml_tanh(context_, ggml_scale(context_, products, scale_ / softcap_));
        products = ggml_scale(context_, products, softcap_);
        scale = 1.0f;
    }
    ggml_tensor* given = ggml_soft_max_ext(context_, products, mask, scale, 0.0f);
    if (ggml_tensor* sinks = sinks_of(group)) ggml_soft_max_add_sinks(given, sinks);
    // On an H200, SQR moves half as many bytes a second as kernels with two operands do.
    const bool squared = importance_.measure().statistic == Statistic::squared_probability;
    return squared ? ggml_mul_inplace(context_, given, given) : given;
}

ggml_tensor* DeviceGraph::mask_of_observed(const DeviceGroup& group, const Order& order, int first,
                                           int n) {
    if (!step_.alike) return mask(group, order, newer(order, first, n), first, n);
    return mask_of_alike(layer_.width_of(group, step_.n_tokens), first, n);
}

// Sums up what queries gave to rows outside of their neighbourhood.
ggml_tensor* DeviceGraph::sum_without_neighbours(const DeviceGroup& group, ggml_tensor* given,
                                                 int first, int n) {
    const std::int64_t count = layer_.heads()[index_of(group.first_head)].count;
    if (is_plain(group) && first >= kNeighbourhood) {
        // Only the newest rows have a query in their neighbourhood, and no entry is among them.
        const std::int64_t n_old = count + first - kNeighbourhood + 1;
        const std::int64_t n_near = count + step_.n_tokens - n_old;
        ggml_tensor* near = ggml_mul(context_, rows_of_given(given, n_old, n_near),
                                     device_.outside_of(context_, n_near, n));
        return ggml_concat(context_, sum_over_queries(given, n_old), sum_over_queries(near, n_near),
                           0);
    }
    ggml_tensor* older = newer(positions_of(group, given->ne[0]), first, n);
    older = ggml_scale_bias(context_, older, -1.0f, 1.0f - kNeighbourhood);
    given = ggml_mul(context_, given, ggml_clamp(context_, older, 0.0f, 1.0f));
    return sum_over_queries(given, is_plain(group) ? count + step_.n_tokens : given->ne[0]);
}

// Returns n rows from `first` on of a tensor [KV head][query head][token][row].
ggml_tensor* DeviceGraph::rows_of_given(ggml_tensor* given, std::int64_t first, std::int64_t n) {
    return ggml_view_4d(context_, given, n, given->ne[1], given->ne[2], given->ne[3], given->nb[1],
                        given->nb[2], given->nb[3],
                        sizeof(float) * static_cast<std::size_t>(first));
}

// Returns for each of the first n rows the sum over all queries, [KV head][row].
ggml_tensor* DeviceGraph::sum_over_queries(ggml_tensor* given, std::int64_t n) {
    const std::int64_t n_queries = given->ne[1] * given->ne[2];
    if (device_.ones_ == nullptr) {
        ggml_tensor* rows = rows_of_given(given, 0, n);
        rows = ggml_cont(context_, ggml_permute(context_, rows, 2, 0, 1, 3));
        rows = ggml_reshape_3d(context_, rows, n_queries, n, given->ne[3]);
        return ggml_reshape_3d(context_, ggml_sum_rows(context_, rows), n, 1, given->ne[3]);
    }
    ggml_tensor* rows =
        ggml_view_3d(context_, given, n, n_queries, given->ne[3], given->nb[1], given->nb[3], 0);
    ggml_tensor* ones =
        device_.ones_->tensor(context_, GGML_TYPE_F32, 0, 1, n_queries, given->ne[3]);
    return ggml_out_prod(context_, rows, ones);
}

}  // namespace entropykv
