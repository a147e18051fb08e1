#include "llama/device_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "attention/attention_params.hpp"
#include "decide/eviction.hpp"
#include "llama/device_graph.hpp"

namespace entropykv {
namespace {

// So many rows of a head may be freed by the eviction after single tokens, besides those of a
// micro-batch; if more are, all positions of the layer are written again.
constexpr int kFreedRows = 64;
// Findings are looked up for so many tokens at most: for as many as the store reads until it
// evicts.
constexpr int kLookedUpTokens = kDecodeRoom;
// Are how many tensors a step in llama.cpp's own graph needs at most: for the writes of a layer,
// for a layer that reads it, and for a group of its heads.
constexpr std::size_t kTensorsOfWrites = 12;
constexpr std::size_t kTensorsOfReader = 10;
constexpr std::size_t kTensorsOfGroup = 12;
// So many tensors at most compute what such a step has found out: about a group of heads that
// reads, and about the tokens of a layer.
constexpr int kTensorsOfObservation = 40;
constexpr int kTensorsOfFindings = 64;
// If more layers read the K and V of one layer, attention is computed between two nodes.
constexpr int kMostReaders = 24;

std::vector<float> factors_of(const RopeParams& rope) {
    std::vector<float> factors;
    for (const double frequency : rope_frequencies(rope))
        factors.push_back(static_cast<float>(1.0 / frequency));
    return factors;
}

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

void DeviceAttention::allocate(int max_tokens, bool in_graph) {
    max_tokens_ = max_tokens;
    const std::size_t n = index_of(max_tokens);
    std::size_t input = device_.aligned(n * sizeof(float)) +
                        device_.aligned(n * index_of(most_predicted_heads_) * sizeof(std::int32_t));
    std::size_t findings = 0;
    std::size_t moves = 0;
    int most_rows = 0;
    for (Served& served : layers_) {
        const LayerShape& shape = served.layer->shape();
        const std::size_t tokens = n * index_of(shape.n_head_kv);
        const std::size_t changed = 2 * tokens + index_of(kFreedRows * shape.n_head_kv);
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
    place_ones();
    if (in_graph) allocate_for_graph();
}

// Lets sums over queries be products with ones, where the device can compute these: transposing
// what is summed up takes several times as long on a GPU.
void DeviceAttention::place_ones() {
    if (!importance_.measure().observes()) return;
    const auto context = device_.graph_context();
    // Only some of the rows are summed up, and some devices compute no products of such a view.
    ggml_tensor* all = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, 512, 64, 2);
    ggml_tensor* given = ggml_view_3d(context.get(), all, 256, 64, 2, all->nb[1], all->nb[2], 0);
    ggml_tensor* ones = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, 1, 64, 2);
    ggml_cgraph* graph = Device::new_graph(context.get());
    ggml_build_forward_expand(graph, ggml_out_prod(context.get(), given, ones));
    if (!device_.unsupported_in(graph).empty()) return;
    std::size_t n = 0;
    for (const Served& served : layers_) n = std::max(n, index_of(served.layer->shape().n_head));
    n *= index_of(std::min(max_tokens_, importance_.observation_window));
    const std::vector<float> values(n, 1.0f);
    ones_ = std::make_unique<DeviceMemory>(device_, n * sizeof(float));
    ones_->write(0, values.data(), n * sizeof(float));
}

// Allocates what steps in llama.cpp's own graph need.
void DeviceAttention::allocate_for_graph() {
    std::size_t queries = 0;
    std::size_t rows =
        device_.aligned(looked_up_tokens() * index_of(most_heads()) * sizeof(std::int32_t));
    std::size_t n_tensors = 0;
    for (Served& served : layers_) {
        const LayerShape& shape = served.layer->shape();
        served.places.queries = queries;
        queries += device_.aligned(sizeof(float) * index_of(shape.readers) *
                                   index_of(shape.n_head) * index_of(shape.k_dim));
        rows +=
            device_.aligned(looked_up_tokens() * index_of(shape.n_head_kv) * sizeof(std::int32_t));
        n_tensors += kTensorsOfWrites +
                     index_of(shape.readers) *
                         (kTensorsOfReader + kTensorsOfGroup * served.layer->groups().size());
    }
    if (importance_.measure().observes())
        queries_ = std::make_unique<DeviceMemory>(device_, queries);
    masks_ = std::make_unique<DeviceMemory>(device_, position_bytes_ / 2);
    looked_up_ = std::make_unique<DeviceMemory>(device_, rows);
    node_memory_.resize(n_tensors * ggml_tensor_overhead());
}

bool DeviceAttention::can_be_in_graph(int layer, int slots) const {
    const Served& served = layers_.at(index_of(layer));
    const int copies = importance_.measure().observes() ? 1 : 0;
    const auto groups = static_cast<int>(served.layer->groups().size());
    return served.slopes.empty() && served.layer->shape().readers <= kMostReaders &&
           groups - 1 + copies <= slots;
}

int DeviceAttention::most_heads() const {
    int most = 0;
    for (const Served& served : layers_) most = std::max(most, served.layer->shape().n_head_kv);
    return most;
}

std::size_t DeviceAttention::looked_up_tokens() const {
    return index_of(std::min(kLookedUpTokens, max_tokens_));
}

void DeviceAttention::lay_out_positions(bool packed) {
    packed_ = packed;
    position_bytes_ = 0;
    for (Served& served : layers_) {
        served.layer->lay_out_positions(packed);
        served.places.positions = position_bytes_;
        served.positions_known = false;
        position_bytes_ += device_.aligned(index_of(served.layer->n_positions()) * sizeof(float));
    }
}

bool DeviceAttention::positions_fit() const {
    return std::all_of(layers_.begin(), layers_.end(),
                       [](const Served& served) { return served.layer->positions_fit(); });
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
    std::size_t bytes = written_.capacity() + found_.capacity() + node_memory_.capacity();
    for (const auto* memory : {&input_, &positions_, &findings_, &predictors_, &row_numbers_,
                               &moves_, &ones_, &masks_, &queries_, &looked_up_})
        if (*memory != nullptr) bytes += (*memory)->bytes();
    for (const Served& served : layers_) bytes += served.predictor.weights.size() * sizeof(float);
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
                          tensor(GGML_TYPE_F32, shape.v_dim, shape.n_head, n_tokens),
                          served.has_sinks ? tensor(GGML_TYPE_F32, shape.n_head, 1, 1) : nullptr};
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
}

// Adds what the graph of a layer needs.
void DeviceAttention::add_inputs(Served& served, StepInput& input) {
    DeviceLayer& layer = *served.layer;
    const LayerShape& shape = layer.shape();
    std::vector<std::int64_t> rows;
    std::vector<std::int64_t> changed;
    std::vector<float> new_positions;
    std::vector<float> seen_rows;
    for (const DeviceHead& head : layer.heads()) {
        for (int token = 0; token < head.staged; ++token) {
            rows.push_back(head.first_row + head.count + token);
            seen_rows.push_back(static_cast<float>(head.count + step_.last_seen(token)));
        }
        for (const int row : head.changed) {
            changed.push_back(head.first_position + row);
            new_positions.push_back(head.positions[index_of(row)]);
        }
    }
    const std::size_t most = index_of((2 * max_tokens_ + kFreedRows) * shape.n_head_kv);
    if (changed.size() > most) served.positions_known = false;
    if (!served.positions_known) {
        std::vector<float> all(index_of(layer.n_positions()));
        copy_positions(served, all.data());
        positions_->write(served.places.positions, all.data(), all.size() * sizeof(float));
        served.positions_known = true;
        changed.clear();
        new_positions.clear();
    }
    for (DeviceHead& head : layer.heads()) head.changed.clear();
    Places& places = served.places;
    places.n_changed = static_cast<int>(changed.size());
    places.rows = input.add(rows);
    places.changed = input.add(changed);
    places.new_positions = input.add(new_positions);
    places.seen_rows = input.add(seen_rows);
    places.slopes = input.add(served.slopes);
    if (shape.window == 0) return;
    std::vector<float> oldest;
    for (int token = 0; token < step_.n_tokens; ++token)
        oldest.push_back(static_cast<float>(shape.oldest_seen(step_.position + token)));
    places.oldest = input.add(oldest);
}

void DeviceAttention::begin_step(const DeviceStep& step) {
    step_ = step;
    if (step.in_graph) return begin_in_graph();
    if (packed_) lay_out_positions(false);
    StepInput input(device_, written_);
    std::vector<float> positions;
    for (int token = 0; token < step.n_tokens; ++token)
        positions.push_back(static_cast<float>(step.position + step.last_seen(token)));
    token_positions_ = input.add(positions);
    std::vector<std::int32_t> turns;
    for (int head = 0; head < most_predicted_heads_; ++head)
        for (int token = 0; token < step.n_tokens; ++token)
            turns.push_back(-(step.rope_position + token));
    turns_ = input.add(turns);
    for (Served& served : layers_) add_inputs(served, input);
    input_->write(0, written_.data(), written_.size());
    place_findings(step.n_tokens, step.observing);
}

// Writes the rows of a single token, and computes the masks of all layers from the positions that
// have changed. All inputs have the same places in every such step, and so have the sources of the
// changed nodes: then a backend that records graphs need not record them again.
void DeviceAttention::begin_in_graph() {
    if (!packed_ || !positions_fit()) lay_out_positions(true);
    bool known = true;
    for (const Served& served : layers_) known = known && served.positions_known;
    StepInput input(device_, written_);
    token_positions_ = input.add(std::vector<float>{static_cast<float>(step_.position)});
    std::vector<std::int64_t> changed;
    std::vector<float> new_positions;
    std::size_t most = 0;
    for (Served& served : layers_) {
        DeviceLayer& layer = *served.layer;
        most += index_of((2 * max_tokens_ + kFreedRows) * layer.shape().n_head_kv);
        std::vector<std::int64_t> rows;
        for (DeviceHead& head : layer.heads()) {
            const std::size_t first =
                served.places.positions / sizeof(float) + index_of(head.first_position);
            const auto change = [&](int row) {
                changed.push_back(static_cast<std::int64_t>(first) + row);
                new_positions.push_back(head.positions[index_of(row)]);
            };
            rows.push_back(head.first_row + head.count);
            if (known) std::for_each(head.changed.begin(), head.changed.end(), change);
            head.changed.clear();
        }
        served.places.rows = input.add(rows);
        served.places.oldest = input.add(std::vector<float>{oldest_seen(served)});
    }
    if (!known || changed.size() > most) {
        write_all_positions();
        changed.clear();
        new_positions.clear();
    }
    const std::size_t changed_at = input.add(changed);
    const std::size_t new_at = input.add(new_positions);
    input_->write(0, written_.data(), written_.size());
    compute_masks(static_cast<std::int64_t>(changed.size()), changed_at, new_at);
    place_findings(0, false);
    node_context_.reset(ggml_init({node_memory_.size(), node_memory_.data(), true}));
    if (node_context_ == nullptr) throw std::bad_alloc();
}

float DeviceAttention::oldest_seen(const Served& served) const {
    return static_cast<float>(std::max(0, served.layer->shape().oldest_seen(step_.position)));
}

void DeviceAttention::copy_positions(const Served& served, float* to) {
    std::fill_n(to, served.layer->n_positions(), kFreeRow);
    for (const DeviceHead& head : served.layer->heads())
        std::copy_n(head.positions.begin(), head.used(), to + head.first_position);
}

void DeviceAttention::write_all_positions() {
    std::vector<float> all(position_bytes_ / sizeof(float), kFreeRow);
    for (Served& served : layers_) {
        copy_positions(served, all.data() + served.places.positions / sizeof(float));
        served.positions_known = true;
    }
    positions_->write(0, all.data(), all.size() * sizeof(float));
}

void DeviceAttention::compute_masks(std::int64_t n_changed, std::size_t changed_at,
                                    std::size_t new_at) {
    const auto context = device_.graph_context();
    ggml_cgraph* graph = Device::new_graph(context.get());
    if (n_changed > 0) {
        ggml_tensor* all =
            positions_->tensor(context.get(), GGML_TYPE_F32, 0, 1,
                               static_cast<std::int64_t>(position_bytes_ / sizeof(float)));
        ggml_build_forward_expand(
            graph,
            ggml_set_rows(context.get(), all,
                          input_->tensor(context.get(), GGML_TYPE_F32, new_at, 1, n_changed),
                          input_->tensor(context.get(), GGML_TYPE_I64, changed_at, n_changed)));
    }
    // Neighbouring layers that see equally far back have one mask.
    for (std::size_t first = 0, next = 0; first < layers_.size(); first = next) {
        const float oldest = oldest_seen(layers_[first]);
        while (next < layers_.size() && oldest_seen(layers_[next]) == oldest) ++next;
        const std::size_t begin = layers_[first].places.positions;
        const std::size_t end =
            next < layers_.size() ? layers_[next].places.positions : position_bytes_;
        const auto n = static_cast<std::int64_t>((end - begin) / sizeof(float));
        ggml_tensor* positions = positions_->tensor(context.get(), GGML_TYPE_F32, begin, n);
        const auto beyond = [&](float sign, float position) {
            ggml_tensor* below = ggml_scale_bias(context.get(), positions, -sign * kMaskSlope,
                                                 sign * kMaskSlope * position);
            return ggml_clamp(context.get(), below, -1e30f, 0.0f);
        };
        ggml_tensor* mask = beyond(1.0f, static_cast<float>(step_.position));
        if (oldest > 0.0f) mask = ggml_add(context.get(), mask, beyond(-1.0f, oldest));
        ggml_build_forward_expand(
            graph, ggml_cpy(context.get(), mask,
                            masks_->tensor(context.get(), GGML_TYPE_F16, begin / 2, n)));
    }
    device_.place(graph);
    device_.compute(graph);
}

void DeviceAttention::change_write(int layer, bool keys, ggml_tensor* node, NodeChanges& changes) {
    DeviceGraph graph(node_context_.get(), nullptr, *this, layers_.at(index_of(layer)), 0, {},
                      step_);
    changes.become(node, graph.write_of(keys, node->src[0]));
}

void DeviceAttention::change_attention(int layer, int reader, const DeviceNode& node,
                                       ggml_tensor* target, const std::vector<ggml_tensor*>& slots,
                                       NodeChanges& changes) {
    Served& served = layers_.at(index_of(layer));
    served.sinks.resize(index_of(served.layer->shape().readers));
    served.sinks.at(index_of(reader)) = node.sinks;
    DeviceGraph graph(node_context_.get(), nullptr, *this, served, reader, node, step_);
    std::vector<ggml_tensor*> operations = graph.attention_of();
    // Also if they are not observed: a backend records a graph only if it stays the same.
    if (queries_ != nullptr) operations.push_back(graph.copy_of_queries());
    if (operations.size() - 1 > slots.size())
        throw std::runtime_error("a graph has fewer nodes that compute nothing than the first one");
    for (std::size_t i = 0; i + 1 < operations.size(); ++i)
        changes.become(slots[i], operations[i + 1]);
    changes.become(target, operations.front());
}

void DeviceAttention::look_up(const UnknownTokens& unknown, bool observed) {
    place_findings(unknown.n, observed);
    StepInput input(device_, written_);
    std::vector<std::int32_t> numbers;
    for (int head = 0; head < most_heads(); ++head)
        for (int token = 0; token < unknown.n; ++token)
            numbers.push_back(-(unknown.rope_position + token));
    input.add(numbers);
    std::vector<std::size_t> rows_at;
    for (const Served& served : layers_) {
        numbers.clear();
        for (const DeviceHead& head : served.layer->heads()) {
            const int first = head.count + unknown.n_staged - unknown.n;
            for (int token = 0; token < unknown.n; ++token)
                numbers.push_back(head.first_row + first + token);
        }
        rows_at.push_back(input.add(numbers));
    }
    if (unknown.n > 0) looked_up_->write(0, written_.data(), written_.size());
    for (std::size_t first = 0; first < layers_.size();) {
        const auto context = device_.graph_context();
        ggml_cgraph* graph = Device::new_graph(context.get());
        // A graph has room for the layers of most models.
        for (; first < layers_.size(); ++first) {
            const Served& served = layers_[first];
            const auto groups = static_cast<int>(served.layer->groups().size());
            const int n =
                kTensorsOfFindings + served.layer->shape().readers * groups * kTensorsOfObservation;
            if (!Device::has_room_for(context.get(), n)) break;
            for (int reader = 0; observed && reader < served.layer->shape().readers; ++reader)
                DeviceGraph(context.get(), graph, *this, served, reader,
                            {nullptr, nullptr, nullptr, nullptr, served.sinks[index_of(reader)]},
                            step_)
                    .add_observation();
            if (unknown.n > 0 && needs_findings(served))
                DeviceGraph(context.get(), graph, *this, served, 0, {}, step_)
                    .add_findings(unknown.n, rows_at[first]);
        }
        if (ggml_graph_n_nodes(graph) == 0) continue;
        device_.place(graph);
        device_.compute(graph);
    }
    end_step();
}

// Chooses places for what the layers find out.
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
        place(served.places.value_squares, needs_value_squares(served), n);
        place(served.places.key_squares, bool(served.predictor), n);
        place(served.places.sums, bool(served.predictor), n);
        place(served.places.observed, observed, served.layer->n_positions());
    }
    found_.resize(end);
}

bool DeviceAttention::has_moves() const {
    return std::any_of(layers_.begin(), layers_.end(), [](const Served& served) {
        const std::vector<DeviceHead>& heads = served.layer->heads();
        return std::any_of(heads.begin(), heads.end(),
                           [](const DeviceHead& head) { return !head.moves.empty(); });
    });
}

void DeviceAttention::move_rows() {
    // A row that gets another one's content is none whose content is moved, so moves may be done in
    // any order, and by parts if there is no room for all.
    while (has_moves()) {
        const auto context = device_.graph_context();
        ggml_cgraph* graph = Device::new_graph(context.get());
        StepInput input(device_, written_);
        for (Served& served : layers_) {
            DeviceLayer& layer = *served.layer;
            std::vector<std::int32_t> from;
            std::vector<std::int64_t> to;
            const std::size_t most = index_of(max_tokens_ * layer.shape().n_head_kv);
            for (DeviceHead& head : layer.heads())
                for (; !head.moves.empty() && from.size() < most; head.moves.pop_back()) {
                    from.push_back(head.first_row + head.moves.back().from);
                    to.push_back(head.first_row + head.moves.back().to);
                }
            if (from.empty()) continue;
            const auto n = static_cast<std::int64_t>(from.size());
            ggml_tensor* from_rows =
                moves_->tensor(context.get(), GGML_TYPE_I32, input.add(from), n);
            ggml_tensor* to_rows = moves_->tensor(context.get(), GGML_TYPE_I64, input.add(to), n);
            for (const ggml_tensor* rows : {layer.k(), layer.v()}) {
                if (rows == nullptr) continue;
                ggml_tensor* all = leaf_of(context.get(), rows);
                ggml_build_forward_expand(
                    graph, ggml_set_rows(context.get(), all,
                                         ggml_get_rows(context.get(), all, from_rows), to_rows));
            }
        }
        moves_->write(0, written_.data(), written_.size());
        device_.place(graph);
        device_.compute(graph);
    }
}

void DeviceAttention::run(int layer, int reader, const DeviceNode& node) {
    const auto context = device_.graph_context();
    const Served& served = layers_.at(index_of(layer));
    ggml_cgraph* graph = Device::new_graph(context.get());
    DeviceGraph(context.get(), graph, *this, served, reader, node, step_).add_step();
    device_.place(graph);
    device_.compute(graph);
}

void DeviceAttention::end_step() {
    if (!found_.empty()) findings_->read(0, found_.data(), found_.size());
}

const float* DeviceAttention::observed(int layer, int head) const {
    const Served& served = layers_.at(index_of(layer));
    if (!has_observed_) return nullptr;
    return reinterpret_cast<const float*>(found_.data() + served.places.observed) +
           served.layer->heads()[index_of(head)].first_position;
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
    return served.predictor.share(head, found(served.places.sums, head)[token],
                                  found(served.places.key_squares, head)[token], value_squares);
}

namespace {

// Builds the graph that turns the keys of a head, by as many positions as an input says for each of
// its rows.
struct Rotation {
    Rotation(ggml_context* context, const DeviceLayer& layer, int head, const RopeParams& rope)
        : graph(Device::new_graph(context)),
          by_row(ggml_new_tensor_1d(context, GGML_TYPE_I32, layer.heads()[index_of(head)].rows())),
          factors(ggml_new_tensor_1d(context, GGML_TYPE_F32, rope.n_dims / 2)) {
        ggml_set_input(by_row);
        ggml_set_input(factors);
        ggml_tensor* all = leaf_of(context, layer.k());
        const DeviceHead& of = layer.heads()[index_of(head)];
        ggml_tensor* stored = ggml_view_2d(
            context, all, all->ne[0] - rope.offset, of.rows(), all->nb[1],
            all->nb[1] * index_of(of.first_row) + ggml_row_size(all->type, rope.offset));
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
    const DeviceLayer& of = *layers_.at(index_of(layer)).layer;
    if (rope.n_dims == 0) return {};
    if (rope.offset % ggml_blck_size(of.type()) != 0) return "ROPE of a part of a block";
    const auto context = device_.graph_context();
    return device_.unsupported_in(Rotation(context.get(), of, 0, rope).graph);
}

void DeviceAttention::rotate(int layer, const RopeParams& rope,
                             const std::vector<std::vector<std::int32_t>>& by_row) {
    const std::vector<float> factors = factors_of(rope);
    const DeviceLayer& of = *layers_.at(index_of(layer)).layer;
    for (int head = 0; head < of.shape().n_head_kv; ++head) {
        const auto context = device_.graph_context();
        const Rotation rotation(context.get(), of, head, rope);
        device_.place(rotation.graph);
        ggml_backend_tensor_set(rotation.by_row, by_row[index_of(head)].data(), 0,
                                ggml_nbytes(rotation.by_row));
        ggml_backend_tensor_set(rotation.factors, factors.data(), 0, ggml_nbytes(rotation.factors));
        device_.traffic.uploads += 2;
        device_.compute(rotation.graph);
    }
}

}  // namespace entropykv
