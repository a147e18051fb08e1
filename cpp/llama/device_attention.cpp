#include "llama/device_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attention/step.hpp"
#include "llama/device_graph.hpp"
#include "llama/step_input.hpp"

namespace entropykv {
namespace {

// most_changed() has room for this many rows of a head besides those of a micro-batch: rows that an
// eviction after single tokens frees.
constexpr int kFreedRows = 64;

}  // namespace

std::vector<float> DevicePredictor::part(int at, int n) const {
    std::vector<float> some;
    for (std::size_t head = 0; head < weights.size(); head += index_of(shape.n)) {
        const auto first = weights.begin() + static_cast<std::ptrdiff_t>(head) + at;
        some.insert(some.end(), first, first + n);
    }
    return some;
}

float DevicePredictor::share(int head, float sum, float key_squares, float value_squares) const {
    const float* of = weights.data() + index_of(head * shape.n);
    const auto log_norm = [](float squares) { return std::log(std::sqrt(squares) + kLeastNorm); };
    sum += of[shape.n - 1] + of[shape.key_log_at] * log_norm(key_squares);
    if (shape.v_dim > 0) sum += of[shape.value_log_at] * log_norm(value_squares);
    return predicted_share(sum);
}

int DeviceAttention::add(DeviceLayer& layer, const DeviceParams& params, bool has_sinks,
                         const DevicePredictor& predictor, int slots) {
    float max_bias = 0.0f;
    std::memcpy(&max_bias, params.data() + 1, sizeof max_bias);
    layers_.push_back(
        {&layer, params,
         max_bias > 0.0f ? alibi_slopes(layer.shape().n_head, max_bias) : std::vector<float>{},
         has_sinks, predictor, slots});
    if (predictor) most_predicted_heads_ = std::max(most_predicted_heads_, layer.shape().n_head_kv);
    return static_cast<int>(layers_.size()) - 1;
}

void DeviceAttention::allocate(int max_tokens, bool in_graph, bool several, bool alike,
                               SingleSteps& singles) {
    singles_ = &singles;
    max_tokens_ = max_tokens;
    several_ = several;
    const std::size_t n = index_of(max_tokens);
    std::size_t input = device_.aligned(n * sizeof(float)) +
                        device_.aligned(n * index_of(most_predicted_heads_) * sizeof(std::int32_t));
    std::size_t findings = 0;
    std::size_t moves = 0;
    int most_rows = 0;
    for (Served& served : layers_) {
        const LayerShape& shape = served.layer->shape();
        const std::size_t tokens = n * index_of(shape.n_head_kv);
        const std::size_t changed = most_changed(shape);
        input += device_.aligned(tokens * sizeof(std::int64_t)) +
                 device_.aligned(changed * sizeof(std::int64_t)) +
                 device_.aligned(changed * sizeof(float)) + device_.aligned(n * sizeof(float)) +
                 device_.aligned(tokens * sizeof(float)) +
                 device_.aligned(served.slopes.size() * sizeof(float));
        const std::size_t of_positions = index_of(served.layer->n_positions()) * sizeof(float);
        moves += device_.aligned(tokens * sizeof(std::int32_t)) +
                 device_.aligned(tokens * sizeof(std::int64_t));
        most_rows = std::max(most_rows, served.layer->n_positions());
        findings += device_.aligned(of_positions) +
                    (served.predictor ? 3 : 1) * device_.aligned(tokens * sizeof(float));
    }
    input_ = std::make_unique<DeviceMemory>(device_, input);
    lay_out_positions(false);
    positions_ = std::make_unique<DeviceMemory>(device_, position_bytes_);
    findings_ = std::make_unique<DeviceMemory>(device_, findings);
    std::vector<float> numbers(index_of(most_rows));
    std::iota(numbers.begin(), numbers.end(), 0.0f);
    row_numbers_ = std::make_unique<DeviceMemory>(device_, numbers.size() * sizeof(float));
    row_numbers_->write(0, numbers.data(), numbers.size() * sizeof(float));
    moves_ = std::make_unique<DeviceMemory>(device_, moves);
    place_predictors();
    place_sinks();
    place_outside();
    place_ones();
    if (alike) allocate_masks_of_alike();
    if (in_graph) allocate_for_graph();
}

// Prepares to compute sums over queries as products with ones, if the device supports these: on a
// GPU, transposing the terms takes several times as long.
void DeviceAttention::place_ones() {
    if (!importance_.measure().observes()) return;
    const auto context = device_.graph_context();
    // Some devices cannot multiply such a view, which covers only some of the rows.
    ggml_tensor* all = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, 512, 64, 2);
    ggml_tensor* given = ggml_view_3d(context.get(), all, 256, 64, 2, all->nb[1], all->nb[2], 0);
    ggml_tensor* ones = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, 1, 64, 2);
    ggml_cgraph* graph = Device::new_graph(context.get());
    ggml_build_forward_expand(graph, ggml_out_prod(context.get(), given, ones));
    if (!device_.unsupported_in(graph).empty()) return;
    std::size_t n = 0;
    for (const Served& served : layers_) n = std::max(n, index_of(served.layer->shape().n_head));
    n *= index_of(observed_of(max_tokens_));
    std::size_t of_single = 0;  // query heads of all layers
    for (const Served& served : layers_) of_single += index_of(served.layer->shape().n_head);
    n = std::max(n, of_single);
    const std::vector<float> values(n, 1.0f);
    ones_ = std::make_unique<DeviceMemory>(device_, n * sizeof(float));
    ones_->write(0, values.data(), n * sizeof(float));
}

// Says which of the newest rows are outside of the neighbourhood of a query, [query][row]: the
// first row is the oldest one that is near to the first query.
void DeviceAttention::place_outside() {
    if (!importance_.measure().observes()) return;
    const int n = observed_of(max_tokens_);
    const std::size_t width = index_of(n + kNeighbourhood - 1);
    std::vector<float> values(index_of(n) * width, 0.0f);
    for (int query = 0; query < n; ++query)
        std::fill_n(values.data() + index_of(query) * width, query, 1.0f);
    outside_ = std::make_unique<DeviceMemory>(device_, values.size() * sizeof(float));
    outside_->write(0, values.data(), values.size() * sizeof(float));
}

// Returns the first n queries and n_rows rows of what place_outside() has written, which depends
// only on distances.
ggml_tensor* DeviceAttention::outside_of(ggml_context* context, std::int64_t n_rows,
                                         std::int64_t n) const {
    const int most = observed_of(max_tokens_);
    ggml_tensor* all = outside_->tensor(context, GGML_TYPE_F32, 0, most + kNeighbourhood - 1, most);
    return ggml_view_2d(context, all, n_rows, n, all->nb[1], 0);
}

// Returns how many positions of a layer may change in a step; if more do, all are written again.
std::size_t DeviceAttention::most_changed(const LayerShape& shape) const {
    return index_of((2 * max_tokens_ + kFreedRows) * shape.n_head_kv);
}

void DeviceAttention::lay_out_positions(bool packed) {
    packed_ = packed;
    if (packed) layout_ = singles_->layout;
    masks_known_ = false;
    position_bytes_ = 0;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        Served& served = layers_[i];
        served.layer->lay_out_positions(packed ? singles_->layers[i].widths
                                               : served.layer->full_widths());
        served.places.positions = position_bytes_;
        served.positions_known = false;
        position_bytes_ += device_.aligned(index_of(served.layer->n_positions()) * sizeof(float));
    }
}

bool DeviceAttention::keeps_places() const { return packed_ && layout_ == singles_->layout; }

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
        places.factors = weights.add(rope_factors(predictor.rope));
    }
    predictors_ = std::make_unique<DeviceMemory>(device_, bytes.size());
    predictors_->write(0, bytes.data(), bytes.size());
}

// Gives the sinks of every KV head a place of its own. In llama.cpp's tensor they lie where some
// backends do not read them.
void DeviceAttention::place_sinks() {
    std::size_t bytes = 0;
    for (Served& served : layers_) {
        const LayerShape& shape = served.layer->shape();
        if (!served.has_sinks) continue;
        served.places.sinks = bytes;
        served.sinks_known.assign(index_of(shape.readers), 0);
        bytes += index_of(shape.readers * shape.n_head_kv) * sinks_bytes(served);
    }
    if (bytes == 0) return;
    sinks_ = std::make_unique<DeviceMemory>(device_, bytes);
    // If only some readers have sinks, the others get sinks that take no attention.
    const std::vector<float> none(bytes / sizeof(float), -1e30f);
    sinks_->write(0, none.data(), bytes);
}

std::size_t DeviceAttention::sinks_bytes(const Served& served) const {
    const LayerShape& shape = served.layer->shape();
    return device_.aligned(index_of(shape.n_head / shape.n_head_kv) * sizeof(float));
}

// Copies the sinks of a layer's reader to the device, when their node is first seen.
void DeviceAttention::keep_sinks(Served& served, int reader, const ggml_tensor* sinks) {
    if (sinks == nullptr || served.sinks_known.at(index_of(reader)) != 0) return;
    const LayerShape& shape = served.layer->shape();
    std::vector<float> values(index_of(shape.n_head));
    ggml_backend_tensor_get(sinks, values.data(), 0, values.size() * sizeof(float));
    std::vector<std::uint8_t> bytes;
    StepInput input(device_, bytes);
    const std::ptrdiff_t n = shape.n_head / shape.n_head_kv;
    for (auto first = values.begin(); first != values.end(); first += n)
        input.add(std::vector<float>(first, first + n));
    const std::size_t of_reader = index_of(reader * shape.n_head_kv) * sinks_bytes(served);
    sinks_->write(served.places.sinks + of_reader, bytes.data(), bytes.size());
    served.sinks_known[index_of(reader)] = 1;
}

std::size_t DeviceAttention::scratch_bytes() const {
    std::size_t bytes =
        written_.capacity() + found_.capacity() + read_sums_.capacity() + node_memory_.capacity();
    for (const auto* memory :
         {&input_, &positions_, &findings_, &predictors_, &sinks_, &row_numbers_, &moves_, &ones_,
          &outside_, &masks_of_alike_, &queries_, &looked_up_, &sums_})
        if (*memory != nullptr) bytes += (*memory)->bytes();
    if (singles_ != nullptr) {  // an equal part for every place, rounded up
        const std::size_t n = index_of(layers_.front().layer->n_places());
        bytes += (singles_->bytes() + n - 1) / n;
    }
    for (const Served& served : layers_) {
        bytes += served.predictor.weights.size() * sizeof(float);
        for (const DeviceHead& head : served.layer->heads())
            bytes += head.moves.capacity() * sizeof(RowMove);
    }
    return bytes;
}

std::string DeviceAttention::unsupported(int layer, int n_tokens) {
    const auto context = device_.graph_context();
    Served served = layers_.at(index_of(layer));
    const LayerShape& shape = served.layer->shape();
    served.places.n_changed = shape.n_head_kv * n_tokens;
    const auto tensor = [&](ggml_type type, int a, int b, int c) {
        return ggml_new_tensor_3d(context.get(), type, a, b, c);
    };
    const DeviceNode node{tensor(GGML_TYPE_F32, shape.k_dim, n_tokens, shape.n_head),
                          tensor(GGML_TYPE_F16, shape.k_dim, n_tokens, shape.n_head_kv),
                          tensor(GGML_TYPE_F16, shape.v_dim, n_tokens, shape.n_head_kv),
                          tensor(GGML_TYPE_F32, shape.v_dim, shape.n_head, n_tokens)};
    const DeviceStep step{n_tokens, 0, importance_.measure().observes()};
    ggml_cgraph* graph = Device::new_graph(context.get());
    for (const bool even : {true, false}) {
        DeviceGraph operations(context.get(), graph, *this, served, 0, node, step);
        if (!even) operations.treat_as_uneven();
        operations.add_step();
    }
    return device_.unsupported_in(graph);
}

void DeviceAttention::forget_positions(int layer) {
    layers_.at(index_of(layer)).positions_known = false;
    masks_known_ = false;
}

// Adds to the input of the step what the graph of a layer needs.
void DeviceAttention::add_inputs(Served& served, StepInput& input) {
    DeviceLayer& layer = *served.layer;
    const LayerShape& shape = layer.shape();
    std::vector<std::int64_t> rows;
    std::vector<float> seen_rows;
    for (const DeviceHead& head : layer.heads()) {
        for (int token = 0; token < head.staged; ++token) {
            rows.push_back(head.first_row + head.count + token);
            seen_rows.push_back(static_cast<float>(head.count + step_.last_seen(token)));
        }
    }
    Places& places = served.places;
    places.rows = input.add(rows);
    places.seen_rows = input.add(seen_rows);
    places.slopes = input.add(served.slopes);
    add_changed_positions(served, input);
    if (shape.window == 0) return;
    std::vector<float> oldest;
    for (int token = 0; token < step_.n_tokens; ++token)
        oldest.push_back(static_cast<float>(shape.oldest_seen(step_.position + token)));
    places.oldest = input.add(oldest);
}

// Adds the positions that have changed since the device was told, or writes all of them.
void DeviceAttention::add_changed_positions(Served& served, StepInput& input) {
    DeviceLayer& layer = *served.layer;
    std::vector<std::int64_t> changed;
    std::vector<float> new_positions;
    for (DeviceHead& head : layer.heads()) {
        for (const int row : head.changed) {
            changed.push_back(head.first_position + row);
            new_positions.push_back(head.positions[index_of(row)]);
        }
        head.changed.clear();
    }
    if (changed.size() > most_changed(layer.shape())) served.positions_known = false;
    if (!served.positions_known) {
        std::vector<float> all(index_of(layer.n_positions()));
        copy_positions(served, all.data());
        positions_->write(served.places.positions, all.data(), all.size() * sizeof(float));
        served.positions_known = true;
        changed.clear();
        new_positions.clear();
    }
    served.places.n_changed = static_cast<int>(changed.size());
    served.places.changed = input.add(changed);
    served.places.new_positions = input.add(new_positions);
}

void DeviceAttention::begin_step(const DeviceStep& step) {
    device_.wait();  // rows may still be moved, and queries of the last step observed
    step_ = step;
    if (step.alike) return begin_alike();
    if (packed_) lay_out_positions(false);
    StepInput input(device_, written_);
    token_positions_ = input.add(positions_of_tokens());
    turns_ = input.add(turns_of_tokens());
    for (Served& served : layers_) add_inputs(served, input);
    input_->tell(written_);
    place_findings(step.n_tokens, step.observing);
}

// Returns by how many positions the keys of this step's tokens are turned back: [KV head][token].
std::vector<std::int32_t> DeviceAttention::turns_of_tokens() const {
    std::vector<std::int32_t> turns;
    for (int head = 0; head < most_predicted_heads_; ++head)
        for (int token = 0; token < step_.n_tokens; ++token)
            turns.push_back(-(step_.rope_position + token));
    return turns;
}

// Returns, for each token of this step, the last position that it sees.
std::vector<float> DeviceAttention::positions_of_tokens() const {
    std::vector<float> positions;
    for (int token = 0; token < step_.n_tokens; ++token)
        positions.push_back(static_cast<float>(step_.position + step_.last_seen(token)));
    return positions;
}

void DeviceAttention::copy_positions(const Served& served, float* to) {
    std::fill_n(to, served.layer->n_positions(), kFreeRow);
    for (const DeviceHead& head : served.layer->heads())
        std::copy_n(head.positions.begin(), head.used(), to + head.first_position);
}

// Chooses places, among the findings of a step, for what its layers find out about n_tokens tokens.
void DeviceAttention::place_findings(int n_tokens, bool observed) {
    n_found_ = n_tokens;
    has_observed_ = observed;
    std::size_t end = 0;
    const auto place = [&](std::size_t& offset, bool wanted, int n) {
        offset = end;
        if (wanted) end = device_.aligned(end + index_of(n) * sizeof(float));
    };
    for (Served& served : layers_) {
        const int n = served.layer->shape().n_head_kv * n_tokens;
        served.places.findings = end;
        place(served.places.value_squares, needs_value_squares(served), n);
        place(served.places.key_squares, bool(served.predictor), n);
        place(served.places.predictions, bool(served.predictor), n);
        place(served.places.observed, observed, served.layer->n_positions());
    }
    found_.resize(end);
}

void DeviceAttention::add_attention(int layer, int reader, const DeviceNode& node,
                                    ggml_context* context, ggml_cgraph* graph) {
    Served& served = layers_.at(index_of(layer));
    keep_sinks(served, reader, node.sinks);
    DeviceGraph(context, graph, *this, served, reader, node, step_).add_step();
}

void DeviceAttention::end_step() {
    findings_->begin_read(found_, 0, found_.size());
    device_.wait();
}

const float* DeviceAttention::observed(int layer, int head) const {
    const Served& served = layers_.at(index_of(layer));
    const DeviceHead& of = served.layer->heads()[index_of(head)];
    if (n_summed_ > 0)
        return reinterpret_cast<const float*>(read_sums_.data() + served.places.sums) +
               of.first_sum;
    if (!has_observed_) return nullptr;
    return reinterpret_cast<const float*>(found_.data() + served.places.observed) +
           of.first_position;
}

const float* DeviceAttention::value_squares(int layer, int head) const {
    if (!importance_.by_values || n_found_ == 0) return nullptr;
    return found(layers_.at(index_of(layer)).places.value_squares, head);
}

float DeviceAttention::predicted(int layer, int head, int token) const {
    const Served& served = layers_.at(index_of(layer));
    if (!served.predictor || n_found_ == 0) return kLeastPrediction;
    const float value_squares =
        needs_value_squares(served) ? found(served.places.value_squares, head)[token] : 0.0f;
    return served.predictor.share(head, found(served.places.predictions, head)[token],
                                  found(served.places.key_squares, head)[token], value_squares);
}

}  // namespace entropykv
