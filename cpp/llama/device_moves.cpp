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

// Lists rows of a RowMemory that are moved, and where they go.
struct Moves {
    std::vector<std::int32_t> from;
    std::vector<std::int64_t> to;

    // Takes moves of a layer's heads, as long as there are fewer than `most`.
    void take(DeviceLayer& layer, std::size_t most) {
        for (DeviceHead& head : layer.heads()) {
            const std::int64_t row = layer.first_in_memory() + head.first_row;
            for (; !head.moves.empty() && from.size() < most; head.moves.pop_back()) {
                from.push_back(static_cast<std::int32_t>(row + head.moves.back().from));
                to.push_back(row + head.moves.back().to);
            }
        }
    }
};

bool moves_rows(const DeviceLayer& layer) {
    return std::any_of(layer.heads().begin(), layer.heads().end(),
                       [](const DeviceHead& head) { return !head.moves.empty(); });
}

}  // namespace

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
    const auto is_moving = [](const auto* sequence) {
        return std::any_of(sequence->layers_.begin(), sequence->layers_.end(),
                           [](const Served& served) { return moves_rows(*served.layer); });
    };
    // No row is both a source and a target, so moves may be done in any order, and in parts if
    // there is no room for all.
    while (std::any_of(sequences.begin(), sequences.end(), is_moving)) {
        const auto context = device.graph_context();
        ggml_cgraph* graph = Device::new_graph(context.get());
        StepInput input(device, first.written_);
        Moves moves;
        for (std::size_t i = 0; i < first.layers_.size(); ++i) {
            const DeviceLayer& layer = *first.layers_[i].layer;
            const std::size_t most =
                moves.from.size() + index_of(first.max_tokens_ * layer.shape().n_head_kv);
            for (DeviceAttention* sequence : sequences)
                moves.take(*sequence->layers_[i].layer, most);
            const bool is_last = i + 1 == first.layers_.size() ||
                                 &first.layers_[i + 1].layer->memory() != &layer.memory();
            const std::size_t n = moves.from.size();
            if (n == 0 || (!is_last && n < kMovedAtOnce)) continue;
            first.add_moves(layer.memory(), moves.from, moves.to, input, context.get(), graph);
            moves.from.clear();
            moves.to.clear();
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
