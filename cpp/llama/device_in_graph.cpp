// Lets llama.cpp's own graph compute the attention of a step of a single token.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "decide/eviction.hpp"
#include "llama/device_attention.hpp"
#include "llama/device_graph.hpp"
#include "llama/step_input.hpp"

namespace entropykv {
namespace {

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

}  // namespace

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

// Tells whether the queries and the results of every KV head lie where the device uses them.
bool DeviceAttention::heads_are_aligned(const LayerShape& shape) const {
    const std::size_t bytes = sizeof(float) * index_of(shape.n_head / shape.n_head_kv);
    return device_.is_aligned(bytes * index_of(shape.k_dim)) &&
           device_.is_aligned(bytes * index_of(shape.v_dim));
}

bool DeviceAttention::can_be_in_graph(int layer, int slots) const {
    const Served& served = layers_.at(index_of(layer));
    const LayerShape& shape = served.layer->shape();
    const int copies = importance_.measure().observes() ? 1 : 0;
    const auto groups = static_cast<int>(served.layer->groups().size());
    return served.slopes.empty() && shape.readers <= kMostReaders &&
           (groups == 1 || heads_are_aligned(shape)) && groups - 1 + copies <= slots &&
           results_fit_nodes(served);
}

// Tells whether attention to any number of a layer's rows writes no further than its results go.
// The nodes that it becomes have no room behind them; some devices need it for copies of rows in
// another type.
bool DeviceAttention::results_fit_nodes(const Served& served) const {
    const DeviceLayer& layer = *served.layer;
    const LayerShape& shape = layer.shape();
    const int of_kv = shape.n_head / shape.n_head_kv;
    const auto context = device_.graph_context();
    const auto fits = [&](std::int64_t width, int third, int fourth) {
        ggml_tensor* q =
            ggml_new_tensor_4d(context.get(), GGML_TYPE_F32, shape.k_dim, 1, of_kv * third, fourth);
        ggml_tensor* k =
            ggml_new_tensor_4d(context.get(), layer.type(), shape.k_dim, width, third, fourth);
        ggml_tensor* v = shape.latent ? ggml_view_4d(context.get(), k, shape.v_dim, width, third,
                                                     fourth, k->nb[1], k->nb[2], k->nb[3], 0)
                                      : ggml_new_tensor_4d(context.get(), layer.type(), shape.v_dim,
                                                           width, third, fourth);
        ggml_tensor* mask = ggml_new_tensor_4d(context.get(), GGML_TYPE_F16, width, 1, 1, fourth);
        ggml_tensor* attended = ggml_flash_attn_ext(context.get(), q, k, v, mask, 1.0f, 0.0f, 0.0f);
        std::memcpy(attended->op_params, served.params.data(), sizeof attended->op_params);
        if (served.has_sinks)
            ggml_flash_attn_ext_add_sinks(
                attended,
                ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, std::int64_t{of_kv} * third));
        // Devices choose their kernels by how many rows there are.
        for (; width > 0; width -= kDeviceRowStep) {
            k->ne[1] = v->ne[1] = mask->ne[0] = width;
            if (ggml_backend_buft_get_alloc_size(device_.memory(), attended) >
                ggml_nbytes(attended))
                return false;
        }
        return true;
    };
    return std::all_of(layer.groups().begin(), layer.groups().end(), [&](const auto& group) {
        const std::int64_t width = layer.position_stride(group);
        return fits(width, group.n_heads, 1) && fits(width, 1, group.n_heads);
    });
}

std::size_t DeviceAttention::looked_up_tokens() const {
    return index_of(std::min(kLookedUpTokens, max_tokens_));
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
        most += most_changed(layer.shape());
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
    keep_sinks(served, reader, node.sinks);
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
                DeviceGraph(context.get(), graph, *this, served, reader, {}, step_)
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

}  // namespace entropykv
