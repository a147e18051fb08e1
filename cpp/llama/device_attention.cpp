#include "llama/device_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/attention_params.hpp"

namespace entropykv {
namespace {

// Lets a product be summed up in f32. Releases of llama.cpp have two names for it.
template <typename Tensor>
auto sum_in_f32(Tensor* product, int) -> decltype(ggml_prec_set_acc(product, GGML_PREC_F32)) {
    return ggml_prec_set_acc(product, GGML_PREC_F32);
}
template <typename Tensor>
void sum_in_f32(Tensor* product, long) {
    ggml_mul_mat_set_prec(product, GGML_PREC_F32);
}

// So many queries are observed at a time, which bounds the memory of their attention weights.
constexpr int kObservedTokens = 64;

// One node attends for whole blocks of tokens, whose mask has about so many values at most.
constexpr int kPartBlock = 64;
constexpr int kMaskValues = 1 << 22;
// A group of KV heads has so many nodes at most, which bounds the graph.
constexpr int kMostParts = 16;
// So many rows of a head may be freed by the eviction after single tokens, besides those of a
// micro-batch; if more are, all positions of the layer are written again.
constexpr int kFreedRows = 64;

std::size_t index(int i) { return static_cast<std::size_t>(i); }

// Turns rows, each by its own number of positions. Any RoPE is one with base 1, whose frequencies
// are given as factors.
ggml_tensor* turned_by(ggml_context* context, ggml_tensor* rows, ggml_tensor* turns,
                       ggml_tensor* factors, const RopeParams& rope) {
    ggml_tensor* turned = ggml_reshape_3d(context, rows, rows->ne[0], 1, rows->ne[1]);
    turned = ggml_rope_ext(context, turned, turns, factors, rope.n_dims,
                           rope.neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL, 0, 1.0f, 1.0f,
                           0.0f, 1.0f, 0.0f, 0.0f);
    return ggml_reshape_2d(context, turned, rows->ne[0], rows->ne[1]);
}

std::vector<float> factors_of(const RopeParams& rope) {
    std::vector<float> factors;
    for (const double frequency : rope_frequencies(rope))
        factors.push_back(static_cast<float>(1.0 / frequency));
    return factors;
}

}  // namespace

std::vector<float> DevicePredictor::part(int at, int n) const {
    std::vector<float> some;
    for (std::size_t head = 0; head < weights.size(); head += index(shape.n)) {
        const auto first = weights.begin() + static_cast<std::ptrdiff_t>(head) + at;
        some.insert(some.end(), first, first + n);
    }
    return some;
}

float DevicePredictor::share(int head, float sum, float key_squares, float value_squares) const {
    const float* of = weights.data() + index(head * shape.n);
    const auto log_norm = [](float squares) { return std::log(std::sqrt(squares) + kLeastNorm); };
    sum += of[shape.n - 1] + of[shape.key_log_at] * log_norm(key_squares);
    if (shape.v_dim > 0) sum += of[shape.value_log_at] * log_norm(value_squares);
    return predicted_share(sum);
}

// Collects what is written to a device at once, each part at an aligned offset.
class StepInput {
public:
    StepInput(const Device& device, std::vector<std::uint8_t>& bytes)
        : device_(device), bytes_(bytes) {
        bytes_.clear();
    }

    // Returns the offset of the values.
    template <typename T>
    std::size_t add(const std::vector<T>& values) {
        const std::size_t offset = device_.aligned(bytes_.size());
        bytes_.resize(offset + values.size() * sizeof(T));
        if (!values.empty())
            std::memcpy(bytes_.data() + offset, values.data(), values.size() * sizeof(T));
        return offset;
    }

private:
    const Device& device_;
    std::vector<std::uint8_t>& bytes_;
};

// Builds the graph of one layer.
class DeviceGraph {
public:
    DeviceGraph(ggml_context* context, const DeviceAttention& device,
                const DeviceAttention::Served& served, int reader, const DeviceNode& node,
                const DeviceStep& step)
        : context_(context),
          graph_(Device::new_graph(context)),
          device_(device),
          served_(served),
          layer_(*served.layer),
          importance_(device.importance_),
          first_reader_(reader == 0),
          node_(node),
          step_(step),
          params_(served.params) {
        std::memcpy(&scale_, params_.data(), sizeof scale_);
        std::memcpy(&softcap_, params_.data() + 2, sizeof softcap_);
        params_[1] = 0;  // the mask has the bias of ALiBi
    }

    ggml_cgraph* build() {
        const LayerShape& shape = layer_.shape();
        // Tokens of other sequences come before these.
        q_ = leaf_of(context_, node_.q, node_.q->nb[1] * index(step_.first));
        output_ = leaf_of(context_, node_.output, node_.output->nb[2] * index(step_.first));
        k_ = leaf_of(context_, layer_.k());
        if (!shape.latent) v_ = leaf_of(context_, layer_.v());
        token_positions_ = of_tokens(device_.token_positions_);
        if (shape.window > 0) oldest_ = of_tokens(served_.places.oldest);
        positions_ = device_.positions_->tensor(context_, GGML_TYPE_F32, served_.places.positions,
                                                1, layer_.n_positions());
        if (first_reader_) write_tokens();
        for (const DeviceGroup& group : layer_.groups()) attend(group);
        return graph_;
    }

private:
    ggml_tensor* of_tokens(std::size_t offset) {
        return device_.input_->tensor(context_, GGML_TYPE_F32, offset, 1, step_.n_tokens);
    }

    // Writes K, V and positions of the tokens to their rows, and frees the rows of those that were
    // evicted since the last step.
    void write_tokens() {
        ggml_tensor* rows =
            device_.input_->tensor(context_, GGML_TYPE_I64, served_.places.rows,
                                   std::int64_t{layer_.shape().n_head_kv} * step_.n_tokens);
        ggml_tensor* keys = values_of(node_.k_cells);
        ggml_tensor* sum = served_.predictor ? product_of_key(keys) : nullptr;
        k_ = set_rows(k_, keys, rows);
        if (v_ != nullptr || importance_.by_values) {
            ggml_tensor* values = values_of(node_.v_cells);
            if (device_.needs_value_squares(served_))
                keep(ggml_sum_rows(context_, ggml_sqr(context_, values)),
                     served_.places.value_squares);
            if (sum != nullptr && served_.predictor.shape.v_dim > 0)
                sum = ggml_add(context_, sum, product(values, served_.places.value_weights));
            if (v_ != nullptr) v_ = set_rows(v_, values, rows);
        }
        if (sum != nullptr) keep(sum, served_.places.sums);
        const std::int64_t n = served_.places.n_changed;
        positions_ = set_rows(
            positions_,
            device_.input_->tensor(context_, GGML_TYPE_F32, served_.places.new_positions, 1, n),
            device_.input_->tensor(context_, GGML_TYPE_I64, served_.places.changed, n));
    }

    // Returns the K or V rows of the micro-batch in f32, [KV head and token][dim].
    ggml_tensor* values_of(const ggml_tensor* cells) {
        ggml_tensor* of_tokens = leaf_of(context_, cells, cells->nb[1] * index(step_.first));
        of_tokens->ne[1] = step_.n_tokens;
        ggml_tensor* values = ggml_cast(context_, of_tokens, GGML_TYPE_F32);
        return ggml_reshape_2d(context_, values, cells->ne[0], step_.n_tokens * cells->ne[2]);
    }

    // Returns the sum of values, each multiplied by its KV head's weight, [KV head][token].
    ggml_tensor* product(ggml_tensor* values, std::size_t weights) {
        const int n_head_kv = layer_.shape().n_head_kv;
        ggml_tensor* of_heads = device_.predictors_->tensor(context_, GGML_TYPE_F32, weights,
                                                            values->ne[0], 1, n_head_kv);
        values = ggml_reshape_3d(context_, values, values->ne[0], step_.n_tokens, n_head_kv);
        return ggml_sum_rows(context_, ggml_mul(context_, values, of_heads));
    }

    // Returns some values of each row of K.
    ggml_tensor* columns(ggml_tensor* rows, int first, int n) {
        return ggml_view_2d(context_, rows, n, rows->ne[1], rows->nb[1],
                            index(first) * sizeof(float));
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
        ggml_tensor* turns =
            device_.input_->tensor(context_, GGML_TYPE_I32, device_.turns_, keys->ne[1]);
        ggml_tensor* factors = device_.predictors_->tensor(
            context_, GGML_TYPE_F32, served_.places.factors, predictor.shape.n_pairs);
        return turned_by(context_, keys, turns, factors, predictor.rope);
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
        return ggml_view_2d(context_, input, 1, n, sizeof(float), index(first) * sizeof(float));
    }

    // Returns by how much rows are newer than queries, [KV head][query][row].
    ggml_tensor* newer(ggml_tensor* row_positions, int first, int n) {
        return ggml_sub(context_, for_queries(row_positions, n),
                        of_queries(token_positions_, first, n));
    }

    // Returns the mask of a group: -infinity for the rows that a query does not see, and 0 for the
    // others, or ALiBi's bias by distance. It is [KV head][query head][query][row] with ALiBi, and
    // [KV head][query][row] without.
    ggml_tensor* mask(const DeviceGroup& group, ggml_tensor* row_positions, int first, int n) {
        ggml_tensor* distance = newer(row_positions, first, n);
        ggml_tensor* hidden = ggml_clamp(context_, distance, 0.0f, 1.0f);
        if (oldest_ != nullptr) {
            ggml_tensor* after =
                ggml_sub(context_, for_queries(row_positions, n), of_queries(oldest_, first, n));
            ggml_tensor* before = ggml_scale(context_, after, -1.0f);
            hidden = ggml_add(context_, hidden, ggml_clamp(context_, before, 0.0f, 1.0f));
        }
        ggml_tensor* mask = ggml_scale(context_, hidden, -1e30f);
        if (!served_.slopes.empty()) {
            const int of_kv = query_heads();
            ggml_tensor* slopes = device_.input_->tensor(
                context_, GGML_TYPE_F32, served_.places.slopes, 1, 1, layer_.shape().n_head);
            slopes = ggml_view_4d(context_, slopes, 1, 1, of_kv, group.n_heads, sizeof(float),
                                  sizeof(float), index(of_kv) * sizeof(float),
                                  index(of_kv * group.first_head) * sizeof(float));
            ggml_tensor* bias =
                ggml_repeat_4d(context_, distance, distance->ne[0], n, of_kv, group.n_heads);
            bias = ggml_mul(context_, bias, slopes);
            mask = ggml_add(context_, bias, mask);
        }
        return ggml_cast(context_, mask, GGML_TYPE_F16);
    }

    // Returns the first `dim` values of the rows of a group: [KV head][row][dim]. The last rows of
    // a head may be those of the next one, which are masked; ggml only lets views overlap that are
    // changed afterwards.
    ggml_tensor* rows_of(ggml_tensor* all, int dim, const DeviceGroup& group, std::int64_t width) {
        const DeviceHead& head = layer_.heads()[index(group.first_head)];
        const std::size_t stride = all->nb[1] * index(head.rows());
        ggml_tensor* rows = ggml_view_4d(
            context_, all, dim, std::min<std::int64_t>(width, head.rows()), 1, group.n_heads,
            all->nb[1], stride, stride, all->nb[1] * index(head.first_row));
        rows->ne[1] = width;
        return rows;
    }

    // Returns a group's part of a tensor with a value for every position, [KV head][row].
    ggml_tensor* by_row(ggml_tensor* all, const DeviceGroup& group, std::int64_t width) {
        const std::size_t stride = sizeof(float) * position_stride(group);
        return ggml_view_4d(
            context_, all, width, 1, 1, group.n_heads, stride, stride, stride,
            sizeof(float) * index(layer_.heads()[index(group.first_head)].first_position));
    }

    // Returns by how many positions the heads of a group lie apart.
    std::size_t position_stride(const DeviceGroup& group) const {
        const int first = group.first_head;
        const int end = first + 1 < layer_.shape().n_head_kv
                            ? layer_.heads()[index(first + 1)].first_position
                            : layer_.n_positions();
        return index(end - layer_.heads()[index(first)].first_position);
    }

    int query_heads() const { return layer_.shape().n_head / layer_.shape().n_head_kv; }

    // Returns the queries of a group: [KV head][query head of the KV head][token][k_dim].
    ggml_tensor* queries_of(const DeviceGroup& group, int first, int n) {
        const int of_kv = query_heads();
        return ggml_view_4d(context_, q_, q_->ne[0], n, of_kv, group.n_heads, q_->nb[1], q_->nb[2],
                            q_->nb[2] * index(of_kv),
                            q_->nb[1] * index(first) + q_->nb[2] * index(of_kv * group.first_head));
    }

    // Returns the sinks of a group's query heads, or null.
    ggml_tensor* sinks_of(const DeviceGroup& group) {
        if (node_.sinks == nullptr) return nullptr;
        return ggml_view_1d(context_, leaf_of(context_, node_.sinks), query_heads(),
                            sizeof(float) * index(query_heads() * group.first_head));
    }

    int width_of(const DeviceGroup& group) const {
        int used = 1;
        for (int i = 0; i < group.n_heads; ++i)
            used = std::max(used, layer_.heads()[index(group.first_head + i)].used_rows());
        return (used + kDeviceRowStep - 1) / kDeviceRowStep * kDeviceRowStep;
    }

    // Returns how many tokens attend to a group in one node: whole blocks, so few that the mask is
    // small, but not so few that there are more than kMostParts nodes.
    int tokens_of_part(const DeviceGroup& group, int width) const {
        const int small = kMaskValues / (width * group.n_heads);
        const int least = (step_.n_tokens + kMostParts - 1) / kMostParts;
        const int whole = std::max(small, least + kPartBlock - 1) / kPartBlock * kPartBlock;
        return std::max(whole, kPartBlock);
    }

    void attend(const DeviceGroup& group) {
        const int width = width_of(group);
        ggml_tensor* positions = by_row(positions_, group, width);
        ggml_tensor* keys = rows_of(k_, layer_.shape().k_dim, group, width);
        ggml_tensor* values = rows_of(v_ == nullptr ? k_ : v_, layer_.shape().v_dim, group, width);
        const int n = tokens_of_part(group, width);
        for (int first = 0; first < step_.n_tokens; first += n)
            attend_part(group, keys, values, positions, first, std::min(n, step_.n_tokens - first));
        if (step_.observing) observe(group, keys, positions);
    }

    // Computes the outputs of n tokens from `first` on.
    void attend_part(const DeviceGroup& group, ggml_tensor* keys, ggml_tensor* values,
                     ggml_tensor* positions, int first, int n) {
        ggml_tensor* attended =
            ggml_flash_attn_ext(context_, queries_of(group, first, n), keys, values,
                                mask(group, positions, first, n), scale_, 0.0f, softcap_);
        std::memcpy(attended->op_params, params_.data(), sizeof attended->op_params);
        if (ggml_tensor* sinks = sinks_of(group)) ggml_flash_attn_ext_add_sinks(attended, sinks);
        const int of_kv = query_heads();
        const std::size_t head_bytes = output_->nb[1];
        ggml_tensor* place = ggml_view_4d(
            context_, output_, output_->ne[0], of_kv, n, group.n_heads, head_bytes, output_->nb[2],
            head_bytes * index(of_kv),
            head_bytes * index(of_kv * group.first_head) + output_->nb[2] * index(first));
        ggml_build_forward_expand(graph_, ggml_cpy(context_, attended, place));
    }

    // Sums up what the queries of the observation window gave to each row.
    void observe(const DeviceGroup& group, ggml_tensor* keys, ggml_tensor* positions) {
        ggml_tensor* sums = nullptr;
        const int n = step_.n_tokens;
        for (int first = std::max(0, n - importance_.observation_window); first < n;
             first += kObservedTokens) {
            ggml_tensor* given =
                given_by(group, keys, positions, first, std::min(kObservedTokens, n - first));
            sums = sums == nullptr ? given : ggml_add(context_, sums, given);
        }
        ggml_tensor* all = device_.findings_->tensor(context_, GGML_TYPE_F32,
                                                     served_.places.observed, layer_.n_positions());
        ggml_tensor* place = by_row(all, group, positions->ne[0]);
        sums = ggml_reshape_4d(context_, sums, positions->ne[0], 1, 1, group.n_heads);
        if (!first_reader_) sums = ggml_add(context_, sums, place);
        ggml_build_forward_expand(graph_, ggml_cpy(context_, sums, place));
    }

    ggml_tensor* given_by(const DeviceGroup& group, ggml_tensor* keys, ggml_tensor* positions,
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
        ggml_tensor* given =
            ggml_soft_max_ext(context_, products, mask(group, positions, first, n), scale, 0.0f);
        if (ggml_tensor* sinks = sinks_of(group)) ggml_soft_max_add_sinks(given, sinks);
        if (importance_.measure().statistic == Statistic::squared_probability)
            given = ggml_sqr(context_, given);
        // 1 for rows outside of the query's neighbourhood, and 0 for the others.
        ggml_tensor* counts =
            ggml_scale_bias(context_, newer(positions, first, n), 1.0f, kNeighbourhood);
        counts = ggml_scale_bias(context_, ggml_clamp(context_, counts, 0.0f, 1.0f), -1.0f, 1.0f);
        given = ggml_mul(context_, given, counts);
        // [KV head][query head][token][row] becomes [KV head][row][query head and token].
        given = ggml_cont(context_, ggml_permute(context_, given, 2, 0, 1, 3));
        given = ggml_reshape_3d(context_, given, given->ne[0] * given->ne[1], given->ne[2],
                                given->ne[3]);
        return ggml_sum_rows(context_, given);
    }

    ggml_context* context_;
    ggml_cgraph* graph_;
    const DeviceAttention& device_;
    const DeviceAttention::Served& served_;
    const DeviceLayer& layer_;
    const ImportanceSettings& importance_;
    bool first_reader_;
    const DeviceNode& node_;
    const DeviceStep& step_;
    DeviceParams params_;
    float scale_ = 1.0f;
    float softcap_ = 0.0f;
    ggml_tensor* q_ = nullptr;
    ggml_tensor* output_ = nullptr;
    ggml_tensor* k_ = nullptr;
    ggml_tensor* v_ = nullptr;  // null: V is a part of K
    ggml_tensor* token_positions_ = nullptr;
    ggml_tensor* oldest_ = nullptr;  // null: queries see everything before them
    ggml_tensor* positions_ = nullptr;
};

int DeviceAttention::add(DeviceLayer& layer, const DeviceParams& params, bool has_sinks,
                         const DevicePredictor& predictor) {
    float max_bias = 0.0f;
    std::memcpy(&max_bias, params.data() + 1, sizeof max_bias);
    layers_.push_back(
        {&layer, params,
         max_bias > 0.0f ? alibi_slopes(layer.shape().n_head, max_bias) : std::vector<float>{},
         has_sinks, predictor});
    if (predictor) most_predicted_heads_ = std::max(most_predicted_heads_, layer.shape().n_head_kv);
    return static_cast<int>(layers_.size()) - 1;
}

void DeviceAttention::allocate(int max_tokens) {
    max_tokens_ = max_tokens;
    const std::size_t n = index(max_tokens);
    std::size_t input = device_.aligned(n * sizeof(float)) +
                        device_.aligned(n * index(most_predicted_heads_) * sizeof(std::int32_t));
    std::size_t positions = 0;
    std::size_t findings = 0;
    for (Served& served : layers_) {
        const LayerShape& shape = served.layer->shape();
        const std::size_t tokens = n * index(shape.n_head_kv);
        const std::size_t changed = 2 * tokens + index(kFreedRows * shape.n_head_kv);
        input += device_.aligned(tokens * sizeof(std::int64_t)) +
                 device_.aligned(changed * sizeof(std::int64_t)) +
                 device_.aligned(changed * sizeof(float)) + device_.aligned(n * sizeof(float)) +
                 device_.aligned(served.slopes.size() * sizeof(float));
        const std::size_t of_positions = index(served.layer->n_positions()) * sizeof(float);
        served.places.positions = positions;
        positions += device_.aligned(of_positions);
        findings += device_.aligned(of_positions) +
                    (served.predictor ? 3 : 1) * device_.aligned(tokens * sizeof(float));
    }
    input_ = std::make_unique<DeviceMemory>(device_, input);
    positions_ = std::make_unique<DeviceMemory>(device_, positions);
    findings_ = std::make_unique<DeviceMemory>(device_, findings);
    place_predictors();
}

// Writes the weights of all predictors to the device, where they stay.
void DeviceAttention::place_predictors() {
    if (most_predicted_heads_ == 0) return;
    std::vector<std::uint8_t> bytes;
    StepInput weights(device_, bytes);
    for (Served& served : layers_) {
        const DevicePredictor& predictor = served.predictor;
        if (!predictor) continue;
        const FeatureShape& shape = predictor.shape;
        Places& places = served.places;
        places.first_weights = weights.add(predictor.part(0, shape.first_pair));
        places.turned_weights =
            weights.add(predictor.part(shape.first_pair, shape.k_dim - shape.first_pair));
        places.norm_weights = weights.add(predictor.part(shape.norms_at, shape.n_pairs));
        places.value_weights = weights.add(predictor.part(shape.k_dim, shape.v_dim));
        places.factors = weights.add(factors_of(predictor.rope));
    }
    predictors_ = std::make_unique<DeviceMemory>(device_, bytes.size());
    predictors_->write(0, bytes.data(), bytes.size());
}

std::size_t DeviceAttention::scratch_bytes() const {
    std::size_t bytes = written_.capacity() + found_.capacity();
    for (const auto* memory : {&input_, &positions_, &findings_, &predictors_})
        if (*memory != nullptr) bytes += (*memory)->bytes();
    for (const Served& served : layers_) bytes += served.predictor.weights.size() * sizeof(float);
    return bytes;
}

std::string DeviceAttention::unsupported(int layer, int n_tokens) {
    const auto context = device_.graph_context();
    Served served = layers_.at(index(layer));
    const LayerShape& shape = served.layer->shape();
    served.places.n_changed = shape.n_head_kv * n_tokens;
    const auto tensor = [&](ggml_type type, int a, int b, int c) {
        return ggml_new_tensor_3d(context.get(), type, a, b, c);
    };
    const DeviceNode node{tensor(GGML_TYPE_F32, shape.k_dim, n_tokens, shape.n_head),
                          tensor(GGML_TYPE_F16, shape.k_dim, n_tokens, shape.n_head_kv),
                          tensor(GGML_TYPE_F16, shape.v_dim, n_tokens, shape.n_head_kv),
                          tensor(GGML_TYPE_F32, shape.v_dim, shape.n_head, n_tokens),
                          served.has_sinks ? tensor(GGML_TYPE_F32, shape.n_head, 1, 1) : nullptr};
    const DeviceStep step{n_tokens, 0, importance_.measure().observes()};
    return device_.unsupported_in(DeviceGraph(context.get(), *this, served, 0, node, step).build());
}

void DeviceAttention::forget_positions(int layer) {
    layers_.at(index(layer)).positions_known = false;
}

// Adds what the graph of a layer needs.
void DeviceAttention::add_inputs(Served& served, StepInput& input) {
    DeviceLayer& layer = *served.layer;
    const LayerShape& shape = layer.shape();
    std::vector<std::int64_t> rows;
    std::vector<std::int64_t> changed;
    std::vector<float> new_positions;
    for (const DeviceHead& head : layer.heads())
        for (const int row : head.staged_rows) {
            rows.push_back(head.first_row + row);
            changed.push_back(head.first_position + row);
            new_positions.push_back(head.positions[index(row)]);
        }
    const std::size_t most = index((2 * max_tokens_ + kFreedRows) * shape.n_head_kv);
    for (const DeviceHead& head : layer.heads())
        for (const int row : head.freed_rows)
            if (head.positions[index(row)] == kFreeRow && changed.size() < most) {
                changed.push_back(head.first_position + row);
                new_positions.push_back(kFreeRow);
            }
    if (changed.size() == most) served.positions_known = false;  // There may be more.
    if (!served.positions_known) {
        std::vector<float> all(index(layer.n_positions()), kFreeRow);
        for (const DeviceHead& head : layer.heads())
            std::copy(head.positions.begin(), head.positions.end(),
                      all.begin() + head.first_position);
        positions_->write(served.places.positions, all.data(), all.size() * sizeof(float));
        served.positions_known = true;
        changed.resize(rows.size());
        new_positions.resize(rows.size());
    }
    for (DeviceHead& head : layer.heads()) head.freed_rows.clear();
    Places& places = served.places;
    places.n_changed = static_cast<int>(changed.size());
    places.rows = input.add(rows);
    places.changed = input.add(changed);
    places.new_positions = input.add(new_positions);
    places.slopes = input.add(served.slopes);
    if (shape.window == 0) return;
    std::vector<float> oldest;
    for (int token = 0; token < step_.n_tokens; ++token)
        oldest.push_back(static_cast<float>(shape.oldest_seen(step_.position + token)));
    places.oldest = input.add(oldest);
}

void DeviceAttention::begin_step(const DeviceStep& step) {
    step_ = step;
    StepInput input(device_, written_);
    std::vector<float> positions;
    for (int token = 0; token < step.n_tokens; ++token)
        positions.push_back(static_cast<float>(step.position + token));
    token_positions_ = input.add(positions);
    std::vector<std::int32_t> turns;
    for (int head = 0; head < most_predicted_heads_; ++head)
        for (int token = 0; token < step.n_tokens; ++token)
            turns.push_back(-(step.rope_position + token));
    turns_ = input.add(turns);
    for (Served& served : layers_) add_inputs(served, input);
    input_->write(0, written_.data(), written_.size());
    place_findings(step);
}

// Chooses places for what the layers find out.
void DeviceAttention::place_findings(const DeviceStep& step) {
    std::size_t end = 0;
    const auto place = [&](std::size_t& offset, bool wanted, int n) {
        offset = end;
        if (wanted) end = device_.aligned(end + index(n) * sizeof(float));
    };
    for (Served& served : layers_) {
        const int n = served.layer->shape().n_head_kv * step.n_tokens;
        place(served.places.value_squares, needs_value_squares(served), n);
        place(served.places.key_squares, bool(served.predictor), n);
        place(served.places.sums, bool(served.predictor), n);
        place(served.places.observed, step.observing, served.layer->n_positions());
    }
    found_.resize(end);
}

void DeviceAttention::run(int layer, int reader, const DeviceNode& node) {
    const auto context = device_.graph_context();
    const Served& served = layers_.at(index(layer));
    ggml_cgraph* graph = DeviceGraph(context.get(), *this, served, reader, node, step_).build();
    device_.place(graph);
    device_.compute(graph);
}

void DeviceAttention::end_step() {
    if (!found_.empty()) findings_->read(0, found_.data(), found_.size());
}

const float* DeviceAttention::observed(int layer, int head) const {
    const Served& served = layers_.at(index(layer));
    if (!step_.observing) return nullptr;
    return reinterpret_cast<const float*>(found_.data() + served.places.observed) +
           served.layer->heads()[index(head)].first_position;
}

const float* DeviceAttention::value_squares(int layer, int head) const {
    if (!importance_.by_values) return nullptr;
    return found(layers_.at(index(layer)).places.value_squares, head);
}

float DeviceAttention::predicted(int layer, int head, int token) const {
    const Served& served = layers_.at(index(layer));
    if (!served.predictor) return kLeastPrediction;
    const float value_squares =
        needs_value_squares(served) ? found(served.places.value_squares, head)[token] : 0.0f;
    return served.predictor.share(head, found(served.places.sums, head)[token],
                                  found(served.places.key_squares, head)[token], value_squares);
}

namespace {

// Builds the graph that turns the keys of a head, by as many positions as an input says for each of
// its rows.
struct Rotation {
    Rotation(ggml_context* context, const DeviceLayer& layer, int head, const RopeParams& rope)
        : graph(Device::new_graph(context)),
          by_row(ggml_new_tensor_1d(context, GGML_TYPE_I32, layer.heads()[index(head)].rows())),
          factors(ggml_new_tensor_1d(context, GGML_TYPE_F32, rope.n_dims / 2)) {
        ggml_set_input(by_row);
        ggml_set_input(factors);
        ggml_tensor* all = leaf_of(context, layer.k());
        const DeviceHead& of = layer.heads()[index(head)];
        ggml_tensor* stored =
            ggml_view_2d(context, all, all->ne[0] - rope.offset, of.rows(), all->nb[1],
                         all->nb[1] * index(of.first_row) + ggml_row_size(all->type, rope.offset));
        ggml_tensor* keys = ggml_cast(context, stored, GGML_TYPE_F32);
        keys = turned_by(context, keys, by_row, factors, rope);
        ggml_build_forward_expand(graph, ggml_cpy(context, keys, stored));
    }

    ggml_cgraph* graph;
    ggml_tensor* by_row;
    ggml_tensor* factors;
};

}  // namespace

std::string DeviceAttention::unsupported_rotation(int layer, const RopeParams& rope) {
    const DeviceLayer& of = *layers_.at(index(layer)).layer;
    if (rope.n_dims == 0) return {};
    if (rope.offset % ggml_blck_size(of.type()) != 0) return "ROPE of a part of a block";
    const auto context = device_.graph_context();
    return device_.unsupported_in(Rotation(context.get(), of, 0, rope).graph);
}

void DeviceAttention::rotate(int layer, const RopeParams& rope,
                             const std::vector<std::vector<std::int32_t>>& by_row) {
    const std::vector<float> factors = factors_of(rope);
    const DeviceLayer& of = *layers_.at(index(layer)).layer;
    for (int head = 0; head < of.shape().n_head_kv; ++head) {
        const auto context = device_.graph_context();
        const Rotation rotation(context.get(), of, head, rope);
        device_.place(rotation.graph);
        ggml_backend_tensor_set(rotation.by_row, by_row[index(head)].data(), 0,
                                ggml_nbytes(rotation.by_row));
        ggml_backend_tensor_set(rotation.factors, factors.data(), 0, ggml_nbytes(rotation.factors));
        device_.traffic.uploads += 2;
        device_.compute(rotation.graph);
    }
}

}  // namespace entropykv
