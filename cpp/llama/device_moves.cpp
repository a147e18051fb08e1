// Moves rows to the places of evicted ones, and turns keys to other positions.
#include <algorithm>

#include "llama/device_attention.hpp"
#include "llama/device_graph.hpp"
#include "llama/step_input.hpp"

namespace entropykv {
namespace {

// One operation moves at most the rows of this many entries, and of one layer more, because it
// copies them in f32.
constexpr std::size_t kMovedAtOnce = 1 << 14;

// Moves the last n values, or all if there are fewer, to the end of `to`.
template <typename T>
void take_last(std::vector<T>& from, std::size_t n, std::vector<T>& to) {
    const auto first = from.end() - static_cast<std::ptrdiff_t>(std::min(n, from.size()));
    to.insert(to.end(), first, from.end());
    from.erase(first, from.end());
}

}  // namespace

void DeviceAttention::collect_moves(int layer) { collect_moves(layers_.at(index_of(layer))); }

void DeviceAttention::collect_moves(Served& served) {
    for (DeviceHead& head : served.layer->heads()) {
        const std::int64_t row = served.layer->first_in_memory() + head.first_row;
        for (const RowMove& move : head.moves) {
            served.moved_from.push_back(static_cast<std::int32_t>(row + move.from));
            served.moved_to.push_back(row + move.to);
        }
        head.moves.clear();
    }
}

// Adds operations that move rows of several layers.
void DeviceAttention::add_moves(const RowMemory& memory, const std::vector<std::int32_t>& from,
                                const std::vector<std::int64_t>& to, StepInput& input,
                                ggml_context* context, ggml_cgraph* graph) const {
    const auto n = static_cast<std::int64_t>(from.size());
    ggml_tensor* from_rows = moves_->tensor(context, GGML_TYPE_I32, input.add(from), n);
    ggml_tensor* to_rows = moves_->tensor(context, GGML_TYPE_I64, input.add(to), n);
    for (const ggml_tensor* rows : {memory.k(), memory.v()}) {
        if (rows == nullptr) continue;
        ggml_tensor* all = leaf_of(context, rows);
        ggml_tensor* moved = ggml_get_rows(context, all, from_rows);
        ggml_build_forward_expand(graph, ggml_set_rows(context, all, moved, to_rows));
    }
}

void DeviceAttention::move_rows(const std::vector<DeviceAttention*>& sequences) {
    DeviceAttention& first = *sequences.front();
    Device& device = first.device_;
    for (DeviceAttention* sequence : sequences)
        for (Served& served : sequence->layers_) sequence->collect_moves(served);
    const auto is_moving = [](const auto* sequence) {
        return std::any_of(sequence->layers_.begin(), sequence->layers_.end(),
                           [](const Served& served) { return !served.moved_from.empty(); });
    };
    // No row is both a source and a target, so moves may be done in any order, and in parts if
    // there is no room for all.
    while (std::any_of(sequences.begin(), sequences.end(), is_moving)) {
        const auto context = device.graph_context();
        ggml_cgraph* graph = Device::new_graph(context.get());
        StepInput input(device, first.written_);
        std::vector<std::int32_t> from;
        std::vector<std::int64_t> to;
        for (std::size_t i = 0; i < first.layers_.size(); ++i) {
            const DeviceLayer& layer = *first.layers_[i].layer;
            const std::size_t most =
                from.size() + index_of(first.max_tokens_ * layer.shape().n_head_kv);
            for (DeviceAttention* sequence : sequences) {
                Served& served = sequence->layers_[i];
                take_last(served.moved_from, most - from.size(), from);
                take_last(served.moved_to, most - to.size(), to);
            }
            const bool is_last = i + 1 == first.layers_.size() ||
                                 &first.layers_[i + 1].layer->memory() != &layer.memory();
            if (from.empty() || (!is_last && from.size() < kMovedAtOnce)) continue;
            first.add_moves(layer.memory(), from, to, input, context.get(), graph);
            from.clear();
            to.clear();
        }
        first.moves_->write(0, first.written_.data(), first.written_.size());
        device.place(graph);
        device.launch(graph);
    }
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
    const std::vector<float> factors = rope_factors(rope);
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
