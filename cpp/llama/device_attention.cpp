#include "llama/device_attention.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

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

constexpr int kMostNodes = 8192;
// So many queries are observed at a time, which bounds the memory of their attention weights.
constexpr int kObservedTokens = 64;

std::size_t index(int i) { return static_cast<std::size_t>(i); }

// Makes a tensor of the graph that stands for one of llama.cpp's: its sources do not belong to our
// graph, which would compute them again.
ggml_tensor* leaf_of(ggml_context* context, const ggml_tensor* tensor) {
    ggml_tensor* leaf = ggml_new_tensor(context, tensor->type, GGML_MAX_DIMS, tensor->ne);
    std::copy(tensor->nb, tensor->nb + GGML_MAX_DIMS, leaf->nb);
    leaf->data = tensor->data;
    leaf->buffer = tensor->buffer;
    leaf->extra = tensor->extra;
    return leaf;
}

ggml_tensor* input(ggml_context* context, ggml_type type, std::int64_t a, std::int64_t b = 1,
                   std::int64_t c = 1, std::int64_t d = 1) {
    ggml_tensor* tensor = ggml_new_tensor_4d(context, type, a, b, c, d);
    ggml_set_input(tensor);
    return tensor;
}

struct Inputs {
    ggml_tensor* rows;                        // [KV head][token]: where K and V of the tokens go
    ggml_tensor* token_positions;             // [token]
    std::vector<ggml_tensor*> row_positions;  // by group: [KV head][row]
};

struct Outputs {
    std::vector<ggml_tensor*> observed;  // by group: [KV head][row]
    ggml_tensor* value_squares = nullptr;
};

// Builds the graph of one layer.
class Builder {
public:
    Builder(ggml_context* context, const DeviceLayer& layer, const ImportanceSettings& importance,
            const DeviceNode& node, const DeviceStep& step)
        : context_(context),
          graph_(ggml_new_graph_custom(context, kMostNodes, false)),
          layer_(layer),
          importance_(importance),
          node_(node),
          step_(step) {
        std::memcpy(&scale_, node.op_params, sizeof scale_);
        std::memcpy(&softcap_, node.op_params + 2, sizeof softcap_);
    }

    void build() {
        const std::int64_t n = step_.n_tokens;
        q_ = leaf_of(context_, node_.q);
        output_ = leaf_of(context_, node_.output);
        inputs.rows = input(context_, GGML_TYPE_I64, layer_.shape().n_head_kv * n);
        inputs.token_positions = input(context_, GGML_TYPE_F32, 1, n);
        k_ = write(layer_.k(), node_.k_cells, nullptr);
        v_ = write(layer_.v(), node_.v_cells, &outputs.value_squares);
        for (const DeviceGroup& group : layer_.groups()) attend(group);
    }

    ggml_cgraph* graph() const { return graph_; }
    Inputs inputs;
    Outputs outputs;

private:
    // Writes the tokens' rows to a tensor of the layer, and returns the tensor as it is afterwards.
    ggml_tensor* write(ggml_tensor* to, const ggml_tensor* cells, ggml_tensor** squares) {
        ggml_tensor* of_tokens = leaf_of(context_, cells);
        of_tokens->ne[1] = step_.n_tokens;
        ggml_tensor* values = ggml_cast(context_, of_tokens, GGML_TYPE_F32);
        values = ggml_reshape_2d(context_, values, cells->ne[0], step_.n_tokens * cells->ne[2]);
        if (squares != nullptr && importance_.by_values) {
            *squares = ggml_sum_rows(context_, ggml_sqr(context_, values));
            finish(*squares);
        }
        ggml_tensor* written = ggml_set_rows(context_, leaf_of(context_, to), values, inputs.rows);
        ggml_build_forward_expand(graph_, written);
        return written;
    }

    void finish(ggml_tensor* tensor) {
        ggml_set_output(tensor);
        ggml_build_forward_expand(graph_, tensor);
    }

    // Returns by how much rows are newer than queries, [KV head][query][row].
    ggml_tensor* newer(ggml_tensor* row_positions, int first, int n) {
        ggml_tensor* queries = ggml_view_2d(context_, inputs.token_positions, 1, n, sizeof(float),
                                            index(first) * sizeof(float));
        ggml_tensor* rows = ggml_repeat_4d(context_, row_positions, row_positions->ne[0], n, 1,
                                           row_positions->ne[3]);
        return ggml_sub(context_, rows, queries);
    }

    // Returns -infinity for the rows that a query does not see, and 0 for the others.
    ggml_tensor* mask(ggml_tensor* row_positions, int first, int n) {
        ggml_tensor* hidden = ggml_clamp(context_, newer(row_positions, first, n), 0.0f, 1.0f);
        return ggml_cast(context_, ggml_scale(context_, hidden, -1e30f), GGML_TYPE_F16);
    }

    // Returns the rows of a group: [KV head][row][dim]. The last rows of a head may be those of the
    // next one, which are masked; ggml only lets views overlap that are changed afterwards.
    ggml_tensor* rows_of(ggml_tensor* all, const DeviceGroup& group, std::int64_t width) {
        const DeviceHead& head = layer_.heads()[index(group.first_head)];
        const std::size_t stride = all->nb[1] * index(head.rows());
        ggml_tensor* rows = ggml_view_4d(
            context_, all, all->ne[0], std::min<std::int64_t>(width, head.rows()), 1, group.n_heads,
            all->nb[1], stride, stride, all->nb[1] * index(head.first_row));
        rows->ne[1] = width;
        return rows;
    }

    // Returns the queries of a group: [KV head][query head of the KV head][token][k_dim].
    ggml_tensor* queries_of(const DeviceGroup& group, int first, int n) {
        const int of_kv = layer_.shape().n_head / layer_.shape().n_head_kv;
        return ggml_view_4d(context_, q_, q_->ne[0], n, of_kv, group.n_heads, q_->nb[1], q_->nb[2],
                            q_->nb[2] * index(of_kv),
                            q_->nb[1] * index(first) + q_->nb[2] * index(of_kv * group.first_head));
    }

    int width_of(const DeviceGroup& group) const {
        int used = 1;
        for (int i = 0; i < group.n_heads; ++i)
            used = std::max(used, layer_.heads()[index(group.first_head + i)].used_rows());
        return (used + kDeviceRowStep - 1) / kDeviceRowStep * kDeviceRowStep;
    }

    void attend(const DeviceGroup& group) {
        const int n = step_.n_tokens;
        const int width = width_of(group);
        ggml_tensor* positions = input(context_, GGML_TYPE_F32, width, 1, 1, group.n_heads);
        inputs.row_positions.push_back(positions);
        ggml_tensor* keys = rows_of(k_, group, width);
        ggml_tensor* values = rows_of(v_, group, width);
        ggml_tensor* attended = ggml_flash_attn_ext(context_, queries_of(group, 0, n), keys, values,
                                                    mask(positions, 0, n), scale_, 0.0f, softcap_);
        std::memcpy(attended->op_params, node_.op_params, sizeof attended->op_params);
        const int of_kv = layer_.shape().n_head / layer_.shape().n_head_kv;
        const std::size_t head_bytes = output_->nb[1];
        ggml_tensor* place = ggml_view_4d(
            context_, output_, output_->ne[0], of_kv, n, group.n_heads, head_bytes, output_->nb[2],
            head_bytes * index(of_kv), head_bytes * index(of_kv * group.first_head));
        ggml_build_forward_expand(graph_, ggml_cpy(context_, attended, place));
        if (step_.observing) observe(group, keys, positions);
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
        finish(sums);
        outputs.observed.push_back(sums);
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
            ggml_soft_max_ext(context_, products, mask(positions, first, n), scale, 0.0f);
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
    const DeviceLayer& layer_;
    const ImportanceSettings& importance_;
    const DeviceNode& node_;
    const DeviceStep& step_;
    float scale_ = 1.0f;
    float softcap_ = 0.0f;
    ggml_tensor* q_ = nullptr;
    ggml_tensor* output_ = nullptr;
    ggml_tensor* k_ = nullptr;
    ggml_tensor* v_ = nullptr;
};

void set(ggml_tensor* tensor, const void* values) {
    ggml_backend_tensor_set(tensor, values, 0, ggml_nbytes(tensor));
}

void set_inputs(const Inputs& inputs, const DeviceLayer& layer, const DeviceStep& step) {
    std::vector<std::int64_t> rows;
    for (const DeviceHead& head : layer.heads())
        for (const int row : head.staged_rows) rows.push_back(head.first_row + row);
    set(inputs.rows, rows.data());
    std::vector<float> positions;
    for (int token = 0; token < step.n_tokens; ++token)
        positions.push_back(static_cast<float>(step.position + token));
    set(inputs.token_positions, positions.data());
    for (std::size_t i = 0; i < layer.groups().size(); ++i) {
        const DeviceGroup& group = layer.groups()[i];
        const auto width = static_cast<std::size_t>(inputs.row_positions[i]->ne[0]);
        std::vector<float> of_rows(width * index(group.n_heads), kFreeRow);
        for (int h = 0; h < group.n_heads; ++h) {
            const DeviceHead& head = layer.heads()[index(group.first_head + h)];
            float* of_head = of_rows.data() + index(h) * width;
            std::copy_n(head.positions.begin(), std::min(width, head.positions.size()), of_head);
            for (std::size_t t = 0; t < head.staged_rows.size(); ++t)
                of_head[head.staged_rows[t]] = positions[t];
        }
        set(inputs.row_positions[i], of_rows.data());
    }
}

std::vector<float> values_of(const ggml_tensor* tensor) {
    std::vector<float> values(static_cast<std::size_t>(ggml_nelements(tensor)));
    ggml_backend_tensor_get(tensor, values.data(), 0, ggml_nbytes(tensor));
    return values;
}

DeviceFindings findings_of(const Outputs& outputs, const DeviceLayer& layer) {
    DeviceFindings found;
    if (outputs.value_squares != nullptr) found.value_squares = values_of(outputs.value_squares);
    for (std::size_t i = 0; i < outputs.observed.size(); ++i) {
        const std::vector<float> sums = values_of(outputs.observed[i]);
        const auto heads = static_cast<std::ptrdiff_t>(layer.groups()[i].n_heads);
        const auto width = static_cast<std::ptrdiff_t>(sums.size()) / heads;
        for (std::ptrdiff_t h = 0; h < heads; ++h)
            found.observed.emplace_back(sums.begin() + h * width, sums.begin() + (h + 1) * width);
    }
    return found;
}

ggml_backend_dev_t device_of(ggml_backend_buffer_type_t memory) {
    // ggml does not say to which device the main memory belongs.
    ggml_backend_dev_t device = ggml_backend_buft_get_device(memory);
    return device != nullptr ? device : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

}  // namespace

DeviceAttention::DeviceAttention(ggml_backend_buffer_type_t memory, int n_threads)
    : memory_(memory),
      backend_(ggml_backend_dev_init(device_of(memory), nullptr)),
      allocator_(ggml_gallocr_new(memory)),
      graph_memory_(ggml_tensor_overhead() * kMostNodes +
                    ggml_graph_overhead_custom(kMostNodes, false)) {
    if (backend_ == nullptr) throw std::runtime_error("a device cannot be used a second time");
    if (allocator_ == nullptr) throw std::bad_alloc();
    ggml_backend_reg_t backend_of = ggml_backend_dev_backend_reg(device_of(memory));
    const auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(backend_of, "ggml_backend_set_n_threads"));
    if (set_threads != nullptr) set_threads(backend_.get(), n_threads);
}

std::string DeviceAttention::name() const { return ggml_backend_dev_name(device_of(memory_)); }

std::string DeviceAttention::unsupported(const DeviceLayer& layer,
                                         const ImportanceSettings& importance,
                                         const std::int32_t* op_params, int n_tokens) {
    const std::unique_ptr<ggml_context, FreeContext> context(
        ggml_init({graph_memory_.size(), graph_memory_.data(), true}));
    const LayerShape& shape = layer.shape();
    const auto tensor = [&](ggml_type type, int a, int b, int c) {
        return ggml_new_tensor_3d(context.get(), type, a, b, c);
    };
    const DeviceNode node{tensor(GGML_TYPE_F32, shape.k_dim, n_tokens, shape.n_head),
                          tensor(GGML_TYPE_F16, shape.k_dim, n_tokens, shape.n_head_kv),
                          tensor(GGML_TYPE_F16, shape.v_dim, n_tokens, shape.n_head_kv),
                          tensor(GGML_TYPE_F32, shape.v_dim, shape.n_head, n_tokens), op_params};
    Builder builder(context.get(), layer, importance, node,
                    {n_tokens, 0, importance.measure().observes()});
    builder.build();
    for (int i = 0; i < ggml_graph_n_nodes(builder.graph()); ++i) {
        const ggml_tensor* op = ggml_graph_node(builder.graph(), i);
        if (!ggml_backend_supports_op(backend_.get(), op)) return ggml_op_name(op->op);
    }
    return {};
}

DeviceFindings DeviceAttention::run(const DeviceLayer& layer, const ImportanceSettings& importance,
                                    const DeviceNode& node, const DeviceStep& step) {
    const std::unique_ptr<ggml_context, FreeContext> context(
        ggml_init({graph_memory_.size(), graph_memory_.data(), true}));
    Builder builder(context.get(), layer, importance, node, step);
    builder.build();
    if (!ggml_gallocr_alloc_graph(allocator_.get(), builder.graph())) throw std::bad_alloc();
    set_inputs(builder.inputs, layer, step);
    if (ggml_backend_graph_compute(backend_.get(), builder.graph()) != GGML_STATUS_SUCCESS)
        throw std::runtime_error("a device could not compute the attention of a layer");
    return findings_of(builder.outputs, layer);
}

}  // namespace entropykv
