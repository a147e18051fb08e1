#include "llama/device_graph.hpp"

#include <algorithm>
#include <cstring>

namespace entropykv {
namespace {

// One node attends for whole blocks of kPartBlock tokens, whose mask has about kMaskValues values
// at most.
constexpr int kPartBlock = 64;
constexpr int kMaskValues = 1 << 23;
// A group of KV heads has at most this many nodes, which bounds the graph.
constexpr int kMostParts = 16;

}  // namespace

std::vector<float> rope_factors(const RopeParams& rope) {
    std::vector<float> factors;
    for (const double frequency : rope_frequencies(rope))
        factors.push_back(static_cast<float>(1.0 / frequency));
    return factors;
}

ggml_tensor* turned_by(ggml_context* context, ggml_tensor* rows, ggml_tensor* turns,
                       ggml_tensor* factors, const RopeParams& rope) {
    ggml_tensor* turned = ggml_reshape_3d(context, rows, rows->ne[0], 1, rows->ne[1]);
    turned = ggml_rope_ext(context, turned, turns, factors, rope.n_dims,
                           rope.neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL, 0, 1.0f, 1.0f,
                           0.0f, 1.0f, 0.0f, 0.0f);
    return ggml_reshape_2d(context, turned, rows->ne[0], rows->ne[1]);
}

DeviceGraph::DeviceGraph(ggml_context* context, ggml_cgraph* graph, const DeviceAttention& device,
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

void DeviceGraph::add_step() {
    q_ = leaf_of(context_, node_.q, node_.q->nb[1] * index_of(step_.first));
    output_ = leaf_of(context_, node_.output, node_.output->nb[2] * index_of(step_.first));
    refer_to_rows();
    refer_to_positions();
    if (first_reader_) write_tokens();
    for (const DeviceGroup& group : layer_.groups()) attend(group);
}

ggml_tensor* DeviceGraph::write_of(bool keys, const ggml_tensor* values) {
    refer_to_rows();
    ggml_tensor* to = keys ? k_ : v_;
    ggml_tensor* from = leaf_of(context_, values);
    const int n_head_kv = layer_.shape().n_head_kv;
    from->ne[0] = to->ne[0];
    from->nb[1] = from->nb[0] * index_of(static_cast<int>(to->ne[0]));
    const std::size_t token_bytes = from->nb[1] * index_of(n_head_kv);
    const int n = n_written();
    if (n == 1 || values->nb[1] == token_bytes) {
        from->ne[1] = std::int64_t{n_head_kv} * n;
        from->nb[2] = from->nb[3] = token_bytes * index_of(n);
        return ggml_set_rows(context_, to, from, rows_of_tokens());
    }
    // Tokens lie apart, so each is an index of the third dimension; the destination is the same
    // memory at every such index.
    from->ne[1] = n_head_kv;
    from->ne[2] = to->ne[2] = n;
    from->nb[2] = values->nb[1];
    from->nb[3] = from->nb[2] * index_of(n);
    to->nb[3] = to->nb[2] * index_of(n);
    ggml_tensor* written = ggml_set_rows(context_, to, from,
                                         ggml_reshape_2d(context_, rows_of_tokens(), n_head_kv, n));
    for (ggml_tensor* all : {to, written}) all->nb[2] = all->nb[3] = 0;
    return written;
}

std::vector<ggml_tensor*> DeviceGraph::attention_of(int n_sequences) {
    n_sequences_ = n_sequences;
    q_ = leaf_of(context_, node_.q, node_.q->nb[1] * index_of(step_.first));
    output_ = leaf_of(context_, node_.output, node_.output->nb[2] * index_of(step_.first));
    refer_to_rows();
    std::vector<ggml_tensor*> all;
    const bool single = step_.n_tokens == 1;
    for (const DeviceGroup& group : layer_.groups()) {
        const std::int64_t width =
            single ? layer_.position_stride(group) : layer_.width_of(group, step_.n_tokens);
        ggml_tensor* mask = single ? stored_mask(group) : mask_of_alike(width);
        if (single && is_plain(group)) mask->ne[3] = 1;  // the mask of the first head serves all
        ggml_tensor* attended =
            attended_by(group, rows_of(k_, layer_.shape().k_dim, group, width),
                        rows_of(v_ == nullptr ? k_ : v_, layer_.shape().v_dim, group, width), mask,
                        0, step_.n_tokens);
        attended->buffer = output_->buffer;
        attended->data = static_cast<char*>(output_->data) +
                         output_->nb[1] * index_of(query_heads() * group.first_head);
        all.push_back(attended);
    }
    return all;
}

void DeviceGraph::refer_to_rows() {
    k_ = leaf_of(context_, layer_.k());
    if (!layer_.shape().latent) v_ = leaf_of(context_, layer_.v());
}

void DeviceGraph::refer_to_positions() {
    token_positions_ = of_tokens(device_.token_positions_);
    if (layer_.shape().window > 0) oldest_ = of_tokens(served_.places.oldest);
    positions_ = device_.positions_->tensor(context_, GGML_TYPE_F32, served_.places.positions, 1,
                                            layer_.n_positions());
}

ggml_tensor* DeviceGraph::rows_of_tokens() {
    if (step_.is_single_in_graph())
        return device_.singles_->input->tensor(
            context_, GGML_TYPE_I64, device_.singles_->layers[number()].rows,
            std::int64_t{layer_.shape().n_head_kv} * n_written());
    return device_.input_->tensor(context_, GGML_TYPE_I64, served_.places.rows,
                                  std::int64_t{layer_.shape().n_head_kv} * step_.n_tokens);
}

// Returns the mask of the single tokens of this step.
ggml_tensor* DeviceGraph::stored_mask(const DeviceGroup& group) {
    const std::int64_t first =
        device_.singles_->first_value(number(), layer_.place()) + first_position(group);
    return device_.singles_->masks->tensor(context_, GGML_TYPE_F16,
                                           sizeof(ggml_fp16_t) * static_cast<std::size_t>(first),
                                           layer_.position_stride(group), 1, 1, n_indices(group));
}

// Returns the mask of the tokens for heads that are alike, [token][row].
ggml_tensor* DeviceGraph::mask_of_alike(std::int64_t width) {
    return device_.masks_of_alike_->tensor(context_, GGML_TYPE_F16, served_.places.mask, width,
                                           step_.n_tokens);
}

// Returns the part of the mask of mask_of_alike(width) for n tokens from `first` on.
ggml_tensor* DeviceGraph::mask_of_alike(std::int64_t width, int first, int n) {
    ggml_tensor* all = mask_of_alike(width);
    return ggml_view_2d(context_, all, width, n, all->nb[1], all->nb[1] * index_of(first));
}

void DeviceGraph::add_mask() {
    const DeviceGroup& group = layer_.groups().front();
    const int width = layer_.width_of(group, step_.n_tokens);
    const Order order = order_of(group, width);
    ggml_tensor* values = mask(group, order, newer(order, 0, step_.n_tokens), 0, step_.n_tokens);
    ggml_build_forward_expand(graph_, ggml_cpy(context_, values, mask_of_alike(width)));
}

ggml_tensor* DeviceGraph::of_tokens(std::size_t offset) {
    return device_.input_->tensor(context_, GGML_TYPE_F32, offset, 1, step_.n_tokens);
}

// Writes K, V and positions of the tokens to their rows, and frees the rows of those that were
// evicted since the last step.
void DeviceGraph::write_tokens() {
    ggml_tensor* rows = rows_of_tokens();
    ggml_tensor* keys = values_of(node_.k_cells);
    ggml_tensor* values = values_of(node_.v_cells);
    if (served_.predictor)
        turns_ = device_.input_->tensor(context_, GGML_TYPE_I32, device_.turns_, keys->ne[1]);
    find_out(keys, values);
    k_ = set_rows(k_, keys, rows);
    if (v_ != nullptr) v_ = set_rows(v_, values, rows);
    add_positions();
}

void DeviceGraph::add_positions() {
    if (positions_ == nullptr) refer_to_positions();
    const std::int64_t n = served_.places.n_changed;
    if (n == 0) return;  // The host has written all positions.
    positions_ = set_rows(
        positions_,
        device_.input_->tensor(context_, GGML_TYPE_F32, served_.places.new_positions, 1, n),
        device_.input_->tensor(context_, GGML_TYPE_I64, served_.places.changed, n));
}

// Returns the K or V rows of the micro-batch in f32, [KV head and token][dim].
ggml_tensor* DeviceGraph::values_of(const ggml_tensor* cells) {
    ggml_tensor* of_tokens = leaf_of(context_, cells, cells->nb[1] * index_of(step_.first));
    of_tokens->ne[1] = step_.n_tokens;
    ggml_tensor* values = ggml_cast(context_, of_tokens, GGML_TYPE_F32);
    return ggml_reshape_2d(context_, values, cells->ne[0], step_.n_tokens * cells->ne[2]);
}

// Writes rows of a tensor, and returns the tensor as it is afterwards.
ggml_tensor* DeviceGraph::set_rows(ggml_tensor* to, ggml_tensor* values, ggml_tensor* rows) {
    ggml_tensor* written = ggml_set_rows(context_, to, values, rows);
    ggml_build_forward_expand(graph_, written);
    return written;
}

// Returns positions of rows for every query, [KV head][query][row].
ggml_tensor* DeviceGraph::for_queries(ggml_tensor* row_positions, int n) {
    if (n == 1) return row_positions;
    return ggml_repeat_4d(context_, row_positions, row_positions->ne[0], n, 1,
                          row_positions->ne[3]);
}

// Returns the values of an input for n queries from `first` on.
ggml_tensor* DeviceGraph::of_queries(ggml_tensor* input, int first, int n) {
    return ggml_view_2d(context_, input, 1, n, sizeof(float), index_of(first) * sizeof(float));
}

DeviceGraph::Order DeviceGraph::positions_of(const DeviceGroup& group, std::int64_t width) {
    return {by_row(positions_, group, width), token_positions_};
}

// Tells whether all heads of a group hide the same rows, and whether those are the last ones:
// tokens lie in the order of the text behind all entries.
bool DeviceGraph::is_plain(const DeviceGroup& group) const {
    return !all_uneven_ && n_sequences_ == 1 && layer_.is_even(group) &&
           layer_.shape().window == 0 && served_.slopes.empty();
}

DeviceGraph::Order DeviceGraph::order_of(const DeviceGroup& group, std::int64_t width) {
    if (!is_plain(group)) return positions_of(group, width);
    ggml_tensor* rows = device_.row_numbers_->tensor(context_, GGML_TYPE_F32, 0, width);
    ggml_tensor* seen = device_.input_->tensor(
        context_, GGML_TYPE_F32, served_.places.seen_rows, 1,
        std::int64_t{step_.n_tokens} * (step_.alike ? 1 : layer_.shape().n_head_kv));
    return {rows, of_queries(seen, step_.n_tokens * group.first_head, step_.n_tokens)};
}

// Returns by how much rows are newer than queries, [KV head][query][row].
ggml_tensor* DeviceGraph::newer(const Order& order, int first, int n) {
    return ggml_sub(context_, for_queries(order.rows, n), of_queries(order.tokens, first, n));
}

// Returns the mask of a group, which hides rows from queries: 0, or ALiBi's bias, for the rows
// that a query sees, and a large negative number, -infinity in f16, for the others. distance:
// newer() of the same rows and queries. The mask is [KV head][query head][query][row] with
// ALiBi, and [KV head][query][row] without.
ggml_tensor* DeviceGraph::mask(const DeviceGroup& group, const Order& order, ggml_tensor* distance,
                               int first, int n) {
    ggml_tensor* mask = where_negative(distance, -kMaskSlope);
    if (oldest_ != nullptr) {
        ggml_tensor* after =
            ggml_sub(context_, for_queries(order.rows, n), of_queries(oldest_, first, n));
        mask = ggml_add(context_, mask, where_negative(after, kMaskSlope));
    }
    if (served_.slopes.empty()) return mask;
    const int of_kv = query_heads();
    ggml_tensor* slopes = device_.input_->tensor(context_, GGML_TYPE_F32, served_.places.slopes, 1,
                                                 1, layer_.shape().n_head);
    slopes = ggml_view_4d(context_, slopes, 1, 1, of_kv, group.n_heads, sizeof(float),
                          sizeof(float), index_of(of_kv) * sizeof(float),
                          index_of(of_kv * group.first_head) * sizeof(float));
    ggml_tensor* bias =
        ggml_repeat_4d(context_, distance, distance->ne[0], n, of_kv, group.n_heads);
    return ggml_add(context_, ggml_mul(context_, bias, slopes), mask);
}

// Returns values times a slope where that is negative, and 0 elsewhere.
ggml_tensor* DeviceGraph::where_negative(ggml_tensor* values, float slope) {
    return ggml_clamp(context_, ggml_scale(context_, values, slope), -1e30f, 0.0f);
}

// Returns the first `dim` values of the rows of a group: [KV head][row][dim]. The last rows of a
// head may be those of the next one, which are masked. ggml refuses to make a view that overlaps
// itself, so the view is changed afterwards.
ggml_tensor* DeviceGraph::rows_of(ggml_tensor* all, int dim, const DeviceGroup& group,
                                  std::int64_t width) {
    const DeviceHead& head = layer_.heads()[index_of(group.first_head)];
    const std::size_t stride = all->nb[1] * index_of(head.rows());
    ggml_tensor* rows = ggml_view_4d(context_, all, dim, std::min<std::int64_t>(width, head.rows()),
                                     1, n_indices(group), all->nb[1], stride, stride,
                                     all->nb[1] * index_of(head.first_row));
    rows->ne[1] = width;
    return rows;
}

// Returns a group's part of a tensor with a value for every position, [KV head][row].
ggml_tensor* DeviceGraph::by_row(ggml_tensor* all, const DeviceGroup& group, std::int64_t width) {
    const std::size_t stride = sizeof(float) * index_of(layer_.position_stride(group));
    return ggml_view_4d(context_, all, width, 1, 1, group.n_heads, stride, stride, stride,
                        sizeof(float) * index_of(first_position(group)));
}

// Returns the queries of a group: [KV head][query head of the KV head][token][k_dim].
ggml_tensor* DeviceGraph::queries_of(const DeviceGroup& group, int first, int n) {
    const int of_kv = query_heads();
    return ggml_view_4d(context_, q_, q_->ne[0], n, of_kv, n_indices(group), q_->nb[1], q_->nb[2],
                        q_->nb[2] * index_of(of_kv),
                        q_->nb[1] * index_of(first - first_query_) +
                            q_->nb[2] * index_of(of_kv * group.first_head));
}

ggml_tensor* DeviceGraph::sinks_of(const DeviceGroup& group) {
    if (!served_.has_sinks) return nullptr;
    const int head = reader_ * layer_.shape().n_head_kv + group.first_head;
    return device_.sinks_->tensor(
        context_, GGML_TYPE_F32,
        served_.places.sinks + index_of(head) * device_.sinks_bytes(served_), query_heads());
}

// Returns how many tokens attend to a group in one node: whole blocks, so few that the mask is
// small, but not so few that there are more than kMostParts nodes.
int DeviceGraph::tokens_of_part(const DeviceGroup& group, int width) const {
    const int small = kMaskValues / (width * (is_plain(group) ? 1 : group.n_heads));
    const int least = (step_.n_tokens + kMostParts - 1) / kMostParts;
    const int whole = std::max(small, least + kPartBlock - 1) / kPartBlock * kPartBlock;
    return std::max(whole, kPartBlock);
}

void DeviceGraph::attend(const DeviceGroup& group) {
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
ggml_tensor* DeviceGraph::attended_by(const DeviceGroup& group, ggml_tensor* keys,
                                      ggml_tensor* values, ggml_tensor* mask, int first, int n) {
    ggml_tensor* queries = queries_of(group, first, n);
    if (is_plain(group)) {
        queries = with_heads_third(queries);
        keys = with_heads_third(keys);
        values = with_heads_third(values);
    }
    ggml_tensor* attended =
        ggml_flash_attn_ext(context_, aligned(queries), keys, values, mask, scale_, 0.0f, softcap_);
    std::memcpy(attended->op_params, params_.data(), sizeof attended->op_params);
    if (ggml_tensor* sinks = sinks_of(group)) ggml_flash_attn_ext_add_sinks(attended, sinks);
    return attended;
}

// Returns a tensor, or a copy of it if its memory is not aligned as the backend requires. Nodes of
// llama.cpp's graph need no copies: see heads_are_aligned().
ggml_tensor* DeviceGraph::aligned(ggml_tensor* tensor) {
    const ggml_tensor* of = tensor->view_src == nullptr ? tensor : tensor->view_src;
    if (step_.in_graph || of->buffer == nullptr) return tensor;
    const auto offset = static_cast<std::size_t>(
        static_cast<const char*>(tensor->data) -
        static_cast<const char*>(ggml_backend_buffer_get_base(of->buffer)));
    return device_.device_.is_aligned(offset) ? tensor : ggml_cont(context_, tensor);
}

// Merges the last two dimensions, whose indices are evenly spaced.
ggml_tensor* DeviceGraph::with_heads_third(const ggml_tensor* tensor) {
    ggml_tensor* merged = leaf_of(context_, tensor);
    if (tensor->view_src != nullptr) merged->buffer = tensor->view_src->buffer;
    merged->ne[2] = tensor->ne[2] * tensor->ne[3];
    merged->ne[3] = 1;
    if (tensor->ne[2] == 1) merged->nb[2] = tensor->nb[3];
    merged->nb[3] = merged->nb[2] * static_cast<std::size_t>(merged->ne[2]);
    return merged;
}

void DeviceGraph::attend_part(const DeviceGroup& group, ggml_tensor* keys, ggml_tensor* values,
                              const Order& order, int first, int n) {
    ggml_tensor* mask_of_part =
        step_.alike ? mask_of_alike(keys->ne[1], first, n)
                    : ggml_cast(context_, mask(group, order, newer(order, first, n), first, n),
                                GGML_TYPE_F16);
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
        place = ggml_view_4d(context_, output_, output_->ne[0], of_kv, n, group.n_heads, head_bytes,
                             output_->nb[2], head_bytes * index_of(of_kv), offset);
    }
    ggml_build_forward_expand(graph_, ggml_cpy(context_, attended, place));
}

}  // namespace entropykv
