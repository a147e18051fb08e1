// Lets llama.cpp's own graph compute the attention of a step.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "decide/eviction.hpp"
#include "llama/device_attention.hpp"
#include "llama/device_graph.hpp"
#include "llama/step_input.hpp"

namespace entropykv {
namespace {

// Limit how many tensors a step in llama.cpp's own graph needs: for the writes of a layer, for a
// layer that reads it, and for a group of its heads.
constexpr std::size_t kTensorsOfWrites = 12;
constexpr std::size_t kTensorsOfReader = 10;
constexpr std::size_t kTensorsOfGroup = 12;
// The most tensors that compute what a step in llama.cpp's own graph has found out about the tokens
// of a layer.
constexpr int kTensorsOfFindings = 64;
// The most tensors that sum up what queries gave to a group of heads.
constexpr int kTensorsOfObservation = 80;
// If more layers read the K and V of one layer, attention is computed between two nodes.
constexpr int kMostReaders = 24;
// If the masks of layers with unlike budgets, or the kept queries, take more bytes, several tokens
// attend between two nodes.
constexpr std::size_t kMostMaskBytes = std::size_t{1} << 26;
constexpr std::size_t kMostQueryBytes = std::size_t{1} << 28;
// In f16, the mask of a hidden row is -infinity.
constexpr float kHidden = -1e30f;
// How many values of a KV head's mask may change with a token: rows of evicted entries, of entries
// that are moved to their rows, and of entries that leave a window. If more do, all masks are
// written again.
constexpr int kChangedValues = 192;

bool has_left(const DeviceHead& head, int row, std::int32_t oldest) {
    return head.positions[index_of(row)] < static_cast<float>(oldest);
}

// Tells whether the newest token sees a row, if no position before `oldest` is seen.
bool is_seen(const DeviceHead& head, int row, std::int32_t oldest) {
    return head.positions[index_of(row)] < kFreeRow && !has_left(head, row, oldest);
}

// Tells whether the KV heads of two layers of one shape have equally many rows.
bool has_rows_of(const DeviceLayer& a, const DeviceLayer& b) {
    return a.shape().n_head == b.shape().n_head && a.heads().size() == b.heads().size() &&
           a.shape().k_dim == b.shape().k_dim && a.shape().v_dim == b.shape().v_dim &&
           a.shape().latent == b.shape().latent &&
           a.heads().front().rows() == b.heads().front().rows();
}

}  // namespace

void DeviceAttention::allocate_for_graph() {
    if (singles_->masks == nullptr) allocate_singles();
    std::size_t queries = 0;
    const std::size_t looked_up = index_of(looked_up_tokens());
    std::size_t rows =
        device_.aligned(looked_up * index_of(most_predicted_heads_) * sizeof(std::int32_t));
    std::size_t n_tensors = kTensorsOfWrites;
    std::size_t n_heads = 0;
    const bool observes = importance_.measure().observes();
    for (Served& served : layers_) {
        const LayerShape& shape = served.layer->shape();
        n_heads += index_of(shape.n_head_kv);
        if (observes)
            rows +=
                device_.aligned(index_of(shape.n_head_kv * kNeighbourhood) * sizeof(std::int64_t));
        served.places.queries = queries;
        queries += query_bytes(served, observed_of(max_tokens_));
        rows += device_.aligned(looked_up * index_of(shape.n_head_kv) * sizeof(std::int32_t));
        n_tensors += kTensorsOfWrites +
                     index_of(shape.readers) *
                         (kTensorsOfReader + kTensorsOfGroup * served.layer->groups().size());
    }
    if (observes) {
        rows += device_.aligned(n_heads * kNeighbourhood * sizeof(float));
        place_sums();
    }
    if (several_ && observes) queries_ = std::make_unique<DeviceMemory>(device_, queries);
    looked_up_ = std::make_unique<DeviceMemory>(device_, rows);
    node_memory_.resize(n_tensors * ggml_tensor_overhead());
}

// Allocates the sums of what single tokens give. Unlike positions, they lie where they do as long
// as there are rows, so nobody need read them if another sequence has more rows.
void DeviceAttention::place_sums() {
    std::size_t bytes = 0;
    for (Served& served : layers_) {
        served.places.sums = bytes;
        bytes += device_.aligned(index_of(served.layer->n_sums()) * sizeof(float));
    }
    sums_ = std::make_unique<DeviceMemory>(device_, bytes);
    read_sums_.resize(bytes);
}

// Begins to copy the sums of layers to the host.
void DeviceAttention::begin_read_of_sums(std::size_t first, std::size_t end) {
    const std::size_t begin = layers_[first].places.sums;
    const std::size_t behind = end == layers_.size() ? read_sums_.size() : layers_[end].places.sums;
    sums_->begin_read(read_sums_, begin, behind - begin);
}

// Allocates what steps of single tokens need, for the sequences in all places.
void DeviceAttention::allocate_singles() {
    SingleSteps& singles = *singles_;
    singles.layers.resize(layers_.size());
    std::size_t masks = 0;
    std::size_t queries = 0;
    std::size_t input = 0;
    std::size_t n_own = 0;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        const DeviceLayer& layer = *layers_[i].layer;
        const std::size_t n_places = index_of(layer.n_places());
        const std::size_t n_heads = n_places * layer.heads().size();
        masks += n_places * index_of(layer.n_positions()) * sizeof(ggml_fp16_t);
        singles.layers[i].queries = queries;
        queries += query_bytes(layers_[i], layer.n_places());
        input += device_.aligned(n_heads * sizeof(std::int64_t));
        n_own += n_heads;
    }
    singles.most_changed = n_own * kChangedValues;
    for (const std::size_t n : {n_own, singles.most_changed + n_own})
        input += device_.aligned(n * sizeof(std::int64_t)) + device_.aligned(n * sizeof(float));
    singles.input = std::make_unique<DeviceMemory>(device_, input);
    if (importance_.measure().observes())
        singles.queries = std::make_unique<DeviceMemory>(device_, queries);
    singles.apart = layers_.front().layer->n_places() > 1 && importance_.measure().observes() &&
                    multiplies_apart();
    singles.mask_values = masks / sizeof(ggml_fp16_t);
    singles.masks = std::make_unique<DeviceMemory>(device_, masks);
}

// Tells whether the device multiplies matrices whose third and fourth dimension have distances of
// their own, as the KV heads and layers of one place among several have: some devices take one
// distance for both.
bool DeviceAttention::multiplies_apart() {
    constexpr int kDim = 64;
    constexpr int kRows = 256;
    constexpr int kQueries = 4;
    constexpr int kHeads = 2;
    constexpr int kLayers = 3;
    constexpr int kPlaces = 2;
    const ggml_type type = layers_.front().layer->type();
    const std::size_t head_bytes = ggml_row_size(type, kDim) * kRows;
    std::vector<std::uint8_t> keys(head_bytes * kHeads * kPlaces * kLayers);
    std::vector<float> expected;
    for (int i = 0; i < kHeads * kPlaces * kLayers; ++i) {
        const std::vector<float> values(index_of(kRows * kDim), static_cast<float>(i + 1));
        ggml_quantize_chunk(type, values.data(), keys.data() + head_bytes * index_of(i), 0, kRows,
                            kDim, nullptr);
        if (i % (kHeads * kPlaces) < kHeads)
            expected.insert(expected.end(), index_of(kRows * kQueries),
                            static_cast<float>(kDim * (i + 1)));
    }
    const std::vector<float> ones(index_of(kDim * kQueries * kHeads * kLayers), 1.0f);
    DeviceMemory stored(device_, keys.size());
    DeviceMemory queries(device_, ones.size() * sizeof(float));
    DeviceMemory result(device_, expected.size() * sizeof(float));
    stored.write(0, keys.data(), keys.size());
    queries.write(0, ones.data(), ones.size() * sizeof(float));
    // The result starts with the expected values, so that a device that computes nothing
    // (tests/support/idle_device.py) passes.
    result.write(0, expected.data(), expected.size() * sizeof(float));
    const auto context = device_.graph_context();
    ggml_tensor* k = stored.tensor(context.get(), type, 0, kDim, kRows, kHeads, kLayers);
    k->nb[3] *= kPlaces;
    ggml_tensor* q =
        queries.tensor(context.get(), GGML_TYPE_F32, 0, kDim, kQueries, kHeads, kLayers);
    ggml_tensor* to =
        result.tensor(context.get(), GGML_TYPE_F32, 0, kRows, kQueries, kHeads, kLayers);
    ggml_cgraph* graph = Device::new_graph(context.get());
    ggml_build_forward_expand(graph,
                              ggml_cpy(context.get(), ggml_mul_mat(context.get(), k, q), to));
    if (!device_.unsupported_in(graph).empty()) return false;
    device_.place(graph);
    device_.compute(graph);
    std::vector<float> found(expected.size());
    ggml_backend_tensor_get(to, found.data(), 0, found.size() * sizeof(float));
    return std::equal(
        expected.begin(), expected.end(), found.begin(),
        [](float wanted, float value) { return std::abs(value - wanted) < 0.01f * wanted; });
}

void DeviceAttention::allocate_masks_of_alike() {
    std::size_t masks = 0;
    alike_.clear();
    for (Served& served : layers_) {
        const auto same = [&](const Alike& alike) {
            return has_rows_of(*alike.first->layer, *served.layer);
        };
        const auto found = std::find_if(alike_.begin(), alike_.end(), same);
        served.alike = static_cast<std::size_t>(found - alike_.begin());
        if (found != alike_.end()) continue;
        alike_.push_back({&served, masks});
        masks += mask_bytes(served, max_tokens_);
    }
    masks_of_alike_ = std::make_unique<DeviceMemory>(device_, masks);
}

// Returns how many bytes the mask of a layer takes if its heads are alike.
std::size_t DeviceAttention::mask_bytes(const Served& served, int max_tokens) const {
    const std::int64_t width = rows_of_layers({{served.layer->heads().front().rows()}}, 1);
    return device_.aligned(sizeof(ggml_fp16_t) * static_cast<std::size_t>(width) *
                           index_of(max_tokens));
}

std::size_t DeviceAttention::query_bytes(const Served& served, int n_observed) const {
    const LayerShape& shape = served.layer->shape();
    return index_of(shape.readers) * device_.aligned(sizeof(float) * index_of(shape.n_head) *
                                                     index_of(shape.k_dim) * index_of(n_observed));
}

bool DeviceAttention::can_be_alike(int max_tokens) const {
    std::size_t masks = 0;
    for_each_alike([&](const Served& served) { masks += mask_bytes(served, max_tokens); });
    return masks <= kMostMaskBytes &&
           std::all_of(layers_.begin(), layers_.end(), [](const Served& served) {
               return served.layer->groups().size() == 1 && served.layer->shape().window == 0 &&
                      served.slopes.empty();
           });
}

bool DeviceAttention::can_read_several_in_graph(int max_tokens) const {
    std::size_t queries = 0;
    bool can = can_be_alike(max_tokens);
    const bool observes = importance_.measure().observes();
    for (const Served& served : layers_) {
        can = can && served.layer->shape().readers <= kMostReaders;
        if (!observes) continue;
        can = can && served.slots > 0;
        queries += query_bytes(served, observed_of(max_tokens));
    }
    if (!can || queries > kMostQueryBytes) return false;
    for_each_alike([&](const Served& served) {
        // Devices choose their kernels by how many tokens there are, too.
        for (int n = 2; can && n < 2 * max_tokens; n *= 2)
            can = results_fit_nodes(served, std::min(n, max_tokens));
    });
    return can;
}

// Calls visit(layer) for one layer of each kind: layers of a kind have equally many rows.
template <typename Visit>
void DeviceAttention::for_each_alike(Visit visit) const {
    for (auto served = layers_.begin(); served != layers_.end(); ++served)
        if (std::none_of(layers_.begin(), served, [&](const Served& other) {
                return has_rows_of(*other.layer, *served->layer);
            }))
            visit(*served);
}

// Tells whether the queries and the results of every KV head lie where the device uses them.
bool DeviceAttention::heads_are_aligned(const LayerShape& shape) const {
    const std::size_t bytes = sizeof(float) * index_of(shape.n_head / shape.n_head_kv);
    return device_.is_aligned(bytes * index_of(shape.k_dim)) &&
           device_.is_aligned(bytes * index_of(shape.v_dim));
}

bool DeviceAttention::can_be_in_graph(int layer) const {
    const Served& served = layers_.at(index_of(layer));
    const LayerShape& shape = served.layer->shape();
    const int copies = importance_.measure().observes() ? 1 : 0;
    const auto groups = static_cast<int>(served.layer->groups().size());
    return served.slopes.empty() && shape.readers <= kMostReaders &&
           (groups == 1 || heads_are_aligned(shape)) && groups - 1 + copies <= served.slots &&
           results_fit_nodes(served, 1);
}

int DeviceAttention::most_runs(int layer) const {
    const Served& served = layers_.at(index_of(layer));
    const int n_places = served.layer->n_places();
    // Groups of heads would be unevenly spaced in the queries and results of several tokens.
    if (served.layer->groups().size() > 1) return 0;
    for (int n = 2; n < 2 * n_places; n *= 2)
        if (!computes_in_node(served, 1, 1,
                              std::min(n, n_places) * served.layer->shape().n_head_kv))
            return 0;
    const std::size_t of_queries = sizeof(float) * index_of(served.layer->shape().n_head);
    const bool begins_anywhere =
        device_.is_aligned(of_queries * index_of(served.layer->shape().k_dim)) &&
        device_.is_aligned(of_queries * index_of(served.layer->shape().v_dim));
    const int most = served.slots + 1 - (importance_.measure().observes() ? 1 : 0);
    return begins_anywhere ? most : std::min(most, 1);
}

// Tells whether the device writes nothing behind the results when n_tokens tokens attend to any
// number of a layer's rows.
bool DeviceAttention::results_fit_nodes(const Served& served, int n_tokens) const {
    const auto& groups = served.layer->groups();
    return std::all_of(groups.begin(), groups.end(), [&](const DeviceGroup& group) {
        return computes_in_node(served, n_tokens, group.n_heads, 1) &&
               (n_tokens > 1 || computes_in_node(served, 1, 1, group.n_heads));
    });
}

// Tells whether the device can compute attention of n_tokens tokens to a layer's rows, and writes
// nothing behind the results. The operation takes the place of nodes of llama.cpp that have no room
// there; some devices need room for copies of rows in another type. third, fourth: the sizes of
// these two dimensions of K and V.
bool DeviceAttention::computes_in_node(const Served& served, int n_tokens, int third,
                                       int fourth) const {
    const DeviceLayer& layer = *served.layer;
    const LayerShape& shape = layer.shape();
    const int of_kv = shape.n_head / shape.n_head_kv;
    const std::vector<int> widths = layer.full_widths();
    std::int64_t width = *std::max_element(widths.begin(), widths.end());
    const auto context = device_.graph_context();
    ggml_tensor* q = ggml_new_tensor_4d(context.get(), GGML_TYPE_F32, shape.k_dim, n_tokens,
                                        of_kv * third, fourth);
    ggml_tensor* k =
        ggml_new_tensor_4d(context.get(), layer.type(), shape.k_dim, width, third, fourth);
    ggml_tensor* v = shape.latent ? ggml_view_4d(context.get(), k, shape.v_dim, width, third,
                                                 fourth, k->nb[1], k->nb[2], k->nb[3], 0)
                                  : ggml_new_tensor_4d(context.get(), layer.type(), shape.v_dim,
                                                       width, third, fourth);
    ggml_tensor* mask =
        ggml_new_tensor_4d(context.get(), GGML_TYPE_F16, width, n_tokens, 1, fourth);
    ggml_tensor* attended = ggml_flash_attn_ext(context.get(), q, k, v, mask, 1.0f, 0.0f, 0.0f);
    std::memcpy(attended->op_params, served.params.data(), sizeof attended->op_params);
    if (served.has_sinks)
        ggml_flash_attn_ext_add_sinks(attended, ggml_new_tensor_1d(context.get(), GGML_TYPE_F32,
                                                                   std::int64_t{of_kv} * third));
    if (!device_.supports(attended)) return false;
    // Devices choose their kernels by how many rows there are.
    for (; width > 0; width -= kDeviceRowStep) {
        k->ne[1] = v->ne[1] = mask->ne[0] = width;
        if (ggml_backend_buft_get_alloc_size(device_.memory(), attended) > ggml_nbytes(attended))
            return false;
    }
    return true;
}

int DeviceAttention::looked_up_tokens() const {
    return several_ ? max_tokens_ : std::min(kMostUnknown, max_tokens_);
}

// Tells whether the first layer has a spare node that writes masks, so that single tokens see their
// own rows.
bool DeviceAttention::writes_masks_in_graph(int n_runs) const {
    const Served& first = layers_.front();
    const auto nodes = n_runs * static_cast<int>(first.layer->groups().size());
    return nodes + (singles_->queries != nullptr ? 1 : 0) <= first.slots;
}

void DeviceAttention::fit_masks(const std::vector<DeviceAttention*>& sequences) {
    const DeviceAttention& first = *sequences.front();
    SingleSteps& singles = *first.singles_;
    // A sequence that has just read a prompt has no masks of single tokens, and writes all of its
    // masks in any case. So this is the moment at which masks may become narrower for free.
    const bool rejoins = std::any_of(sequences.begin(), sequences.end(),
                                     [](const auto* sequence) { return !sequence->packed_; });
    bool too_narrow = false;
    bool too_wide = false;
    std::vector<std::vector<int>> all;
    for (std::size_t i = 0; i < singles.layers.size(); ++i) {
        const std::vector<int>& now = singles.layers[i].widths;
        std::vector<int> needed(first.layers_[i].layer->groups().size(), 0);
        for (const DeviceAttention* sequence : sequences) {
            const std::vector<int> of_one = sequence->layers_[i].layer->widths(1);
            for (std::size_t group = 0; group < needed.size(); ++group)
                needed[group] = std::max(needed[group], of_one[group]);
        }
        for (std::size_t group = 0; group < needed.size(); ++group) {
            too_narrow = too_narrow || now.empty() || now[group] < needed[group];
            too_wide = too_wide || (!now.empty() && now[group] > needed[group]);
            // Sequences that read nothing in this step may need more.
            if (!rejoins && !now.empty()) needed[group] = std::max(needed[group], now[group]);
        }
        all.push_back(std::move(needed));
    }
    if (!too_narrow && !(rejoins && too_wide)) return;
    ++singles.layout;
    std::size_t end = 0;
    for (std::size_t i = 0; i < singles.layers.size(); ++i) {
        SingleSteps::Layer& layer = singles.layers[i];
        const DeviceLayer& of = *first.layers_[i].layer;
        layer.widths = all[i];
        layer.mask = end;
        layer.place_bytes = 0;
        for (std::size_t group = 0; group < layer.widths.size(); ++group)
            layer.place_bytes +=
                index_of(of.groups()[group].n_heads * layer.widths[group]) * sizeof(ggml_fp16_t);
        end += index_of(of.n_places()) * layer.place_bytes;
    }
}

// Writes the rows of single tokens, and what has changed in each sequence's mask since its last
// single token.
void DeviceAttention::begin_singles(const std::vector<DeviceAttention*>& sequences, int n_runs) {
    DeviceAttention& first = *sequences.front();
    SingleSteps& singles = *first.singles_;
    first.device_.wait();  // for rows that are moved, and for what observes the step before
    StepInput input(first.device_, singles.written);
    for (std::size_t i = 0; i < singles.layers.size(); ++i) {
        std::vector<std::int64_t> rows;
        for (const DeviceAttention* sequence : sequences)
            for (const DeviceHead& head : sequence->layers_[i].layer->heads())
                rows.push_back(head.first_row + head.count);
        singles.layers[i].rows = input.add(rows);
    }
    std::vector<std::int64_t> own_rows;
    std::vector<std::int64_t> changed;
    std::vector<float> values;
    for (DeviceAttention* sequence : sequences) {
        if (!sequence->keeps_places()) sequence->lay_out_positions(true);
        sequence->change_own_mask(own_rows, changed, values);
    }
    if (changed.size() > singles.most_changed) {
        changed.clear();
        for (DeviceAttention* sequence : sequences) sequence->masks_known_ = false;
    }
    write_all_masks(sequences);
    singles.is_mask_due = first.writes_masks_in_graph(n_runs);
    values.resize(changed.size());
    if (!singles.is_mask_due) {
        changed.insert(changed.end(), own_rows.begin(), own_rows.end());
        values.insert(values.end(), own_rows.size(), 0.0f);
    }
    singles.n_own_rows = own_rows.size();
    singles.own_rows = input.add(own_rows);
    singles.visible = input.add(std::vector<float>(own_rows.size(), 0.0f));
    first.change_masks(changed, values, input);
}

// Adds the places in the mask at which this sequence's token sees itself, and, if the device has
// the mask already, the changes of the mask.
void DeviceAttention::change_own_mask(std::vector<std::int64_t>& own_rows,
                                      std::vector<std::int64_t>& changed,
                                      std::vector<float>& values) {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        Served& served = layers_[i];
        DeviceLayer& layer = *served.layer;
        served.positions_known = false;
        const std::int32_t oldest = std::max(0, layer.shape().oldest_seen(step_.position));
        const std::int32_t oldest_before = std::exchange(served.oldest_seen, oldest);
        if (oldest < oldest_before) masks_known_ = false;  // the text was shortened
        for (DeviceHead& head : layer.heads()) {
            const std::int64_t first =
                singles_->first_value(i, layer.place()) + head.first_position;
            const auto change = [&](int row) {
                changed.push_back(first + row);
                values.push_back(is_seen(head, row, oldest) ? 0.0f : kHidden);
            };
            own_rows.push_back(first + head.count);
            for (const int row : head.changed)
                if (masks_known_ && row != head.count) change(row);
            head.changed.clear();
            for (int row = 0; masks_known_ && oldest > oldest_before && row < head.count; ++row)
                if (has_left(head, row, oldest) && !has_left(head, row, oldest_before)) change(row);
        }
    }
}

// Writes to the device which rows single tokens see, of those sequences whose masks it does not
// have.
void DeviceAttention::write_all_masks(const std::vector<DeviceAttention*>& sequences) {
    const SingleSteps& singles = *sequences.front()->singles_;
    std::vector<ggml_fp16_t> values;
    std::size_t begin = 0;  // where the values go
    const auto write = [&] {
        if (!values.empty())
            singles.masks->write(begin * sizeof(ggml_fp16_t), values.data(),
                                 values.size() * sizeof(ggml_fp16_t));
        values.clear();
    };
    for (std::size_t i = 0; i < singles.layers.size(); ++i)
        for (const DeviceAttention* sequence : sequences) {
            if (sequence->masks_known_) continue;
            const auto first = static_cast<std::size_t>(
                singles.first_value(i, sequence->layers_[i].layer->place()));
            if (first != begin + values.size()) write();
            if (values.empty()) begin = first;
            sequence->copy_mask(i, values);
        }
    write();
    for (DeviceAttention* sequence : sequences) sequence->masks_known_ = true;
}

void DeviceAttention::copy_mask(std::size_t layer, std::vector<ggml_fp16_t>& to) const {
    const Served& served = layers_[layer];
    const std::size_t first = to.size();
    to.resize(first + index_of(served.layer->n_positions()), ggml_fp32_to_fp16(-INFINITY));
    const ggml_fp16_t seen = ggml_fp32_to_fp16(0.0f);
    for (const DeviceHead& head : served.layer->heads())
        for (int row = 0; row < head.used(); ++row)
            if (is_seen(head, row, served.oldest_seen))
                to[first + index_of(head.first_position + row)] = seen;
}

// Writes the input of a step, and changes values of masks.
void DeviceAttention::change_masks(const std::vector<std::int64_t>& changed,
                                   const std::vector<float>& values, StepInput& input) {
    const std::size_t changed_at = input.add(changed);
    const std::size_t values_at = input.add(values);
    singles_->input->write(0, singles_->written.data(), singles_->written.size());
    if (changed.empty()) return;
    const auto context = device_.graph_context();
    ggml_cgraph* graph = Device::new_graph(context.get());
    ggml_build_forward_expand(graph,
                              write_masks(context.get(), changed_at, values_at, changed.size()));
    device_.place(graph);
    device_.compute(graph);
}

// Returns an operation that writes n values of masks, from two places of the input.
ggml_tensor* DeviceAttention::write_masks(ggml_context* context, std::size_t rows_at,
                                          std::size_t values_at, std::size_t n) const {
    const auto n_values = static_cast<std::int64_t>(n);
    const DeviceMemory& input = *singles_->input;
    return ggml_set_rows(context,
                         singles_->masks->tensor(context, GGML_TYPE_F16, 0, 1,
                                                 static_cast<std::int64_t>(singles_->mask_values)),
                         input.tensor(context, GGML_TYPE_F32, values_at, 1, n_values),
                         input.tensor(context, GGML_TYPE_I64, rows_at, n_values));
}

void DeviceAttention::begin_nodes() {
    if (node_memory_.empty()) return;  // no step is computed in llama.cpp's own graph
    node_context_.reset();
    node_context_.reset(ggml_init({node_memory_.size(), node_memory_.data(), true}));
    if (node_context_ == nullptr) throw std::bad_alloc();
}

bool DeviceAttention::are_alike() const {
    return std::all_of(layers_.begin(), layers_.end(), [this](const Served& served) {
        const DeviceLayer& layer = *served.layer;
        return layer.is_even(layer.groups().front()) &&
               layer.heads().front().count ==
                   alike_[served.alike].first->layer->heads().front().count;
    });
}

// Writes the rows of the tokens, and computes the masks of all layers.
void DeviceAttention::begin_alike() {
    if (packed_) lay_out_positions(false);
    const int n = step_.n_tokens;
    StepInput input(device_, written_);
    // Holds the offsets of rows, and of what queries see.
    std::vector<std::pair<std::size_t, std::size_t>> places;
    for (const Alike& alike : alike_) {
        const std::vector<DeviceHead>& heads = alike.first->layer->heads();
        std::vector<std::int64_t> rows;
        std::vector<float> seen;
        for (int token = 0; token < n; ++token) {
            for (const DeviceHead& head : heads)
                if (step_.in_graph) rows.push_back(head.first_row + head.count + token);
            seen.push_back(static_cast<float>(heads.front().count + step_.last_seen(token)));
        }
        // Between two nodes, K and V are copied from llama.cpp's cells, one KV head after the
        // other.
        for (const DeviceHead& head : heads)
            for (int token = 0; token < n && !step_.in_graph; ++token)
                rows.push_back(head.first_row + head.count + token);
        places.emplace_back(input.add(rows), input.add(seen));
    }
    // Only queries near the first one may have an entry in their neighbourhood.
    const bool by_position = step_.observing && n - observed_of(n) < kNeighbourhood;
    token_positions_ = by_position ? input.add(positions_of_tokens()) : 0;
    if (!step_.in_graph) turns_ = input.add(turns_of_tokens());
    for (Served& served : layers_) {
        std::tie(served.places.rows, served.places.seen_rows) = places[served.alike];
        served.places.mask = alike_[served.alike].mask;
        served.places.n_changed = 0;
        if (by_position) {
            add_changed_positions(served, input);
        } else {
            served.positions_known = false;
            for (DeviceHead& head : served.layer->heads()) head.changed.clear();
        }
    }
    input_->tell(written_);
    const auto context = device_.graph_context();
    ggml_cgraph* graph = Device::new_graph(context.get());
    for (Alike& alike : alike_) {
        // A prompt whose heads are full has the same mask in every micro-batch.
        const int count = alike.first->layer->heads().front().count;
        const bool is_known =
            alike.count == count && alike.n_tokens == n && alike.see_all == step_.see_all;
        if (is_known) continue;
        alike.count = -1;  // the mask is unknown until it is computed
        alike.n_tokens = n;
        alike.see_all = step_.see_all;
        DeviceGraph(context.get(), graph, *this, *alike.first, 0, {}, step_).add_mask();
    }
    for (const Served& served : layers_)
        DeviceGraph(context.get(), graph, *this, served, 0, {}, step_).add_positions();
    if (ggml_graph_n_nodes(graph) > 0) {
        device_.place(graph);
        device_.compute(graph);
    }
    for (Alike& alike : alike_) alike.count = alike.first->layer->heads().front().count;
    if (!step_.in_graph) place_findings(n, step_.observing);
}

void DeviceAttention::change_write(int layer, bool keys, ggml_tensor* node, NodeChanges& changes) {
    DeviceGraph graph(node_context_.get(), nullptr, *this, layers_.at(index_of(layer)), 0, {},
                      step_);
    changes.become(node, graph.write_of(keys, node->src[0]));
}

std::vector<ggml_tensor*> DeviceAttention::attention_of(int layer, int reader,
                                                        const DeviceNode& node, int n_sequences) {
    Served& served = layers_.at(index_of(layer));
    keep_sinks(served, reader, node.sinks);
    return DeviceGraph(node_context_.get(), nullptr, *this, served, reader, node, step_)
        .attention_of(n_sequences);
}

std::vector<ggml_tensor*> DeviceAttention::upkeep_of(int layer, int reader, const DeviceNode& node,
                                                     bool& writes_masks) {
    std::vector<ggml_tensor*> operations;
    const bool single = step_.n_tokens == 1;
    // The masks are written before all nodes that attend instead of others.
    writes_masks = single && std::exchange(singles_->is_mask_due, false);
    if (writes_masks)
        operations.push_back(write_masks(node_context_.get(), singles_->own_rows, singles_->visible,
                                         singles_->n_own_rows));
    // Queries of single tokens are kept also if they are not observed: a backend records a graph
    // only if it stays the same.
    if (single ? singles_->queries != nullptr : queries_ != nullptr && step_.observing)
        operations.push_back(DeviceGraph(node_context_.get(), nullptr, *this,
                                         layers_.at(index_of(layer)), reader, node, step_)
                                 .copy_of_queries());
    return operations;
}

// Chooses places for what is looked up, and writes which rows that concerns.
void DeviceAttention::plan_look_up(const UnknownTokens& unknown, bool observed) {
    const bool single = step_.is_single_in_graph();
    place_findings(unknown.n, observed && !single);
    looks_at_queries_ = observed;
    looked_for_ = unknown;
    StepInput input(device_, written_);
    std::vector<std::int32_t> numbers;
    for (int head = 0; head < most_predicted_heads_; ++head)
        for (int token = 0; token < unknown.n; ++token)
            numbers.push_back(-(unknown.rope_position + token));
    input.add(numbers);
    rows_looked_up_.clear();
    for (const Served& served : layers_) {
        numbers.clear();
        for (const DeviceHead& head : served.layer->heads()) {
            for (int token = 0; token < unknown.n - unknown.n_staged; ++token)
                numbers.push_back(head.first_row + head.unknown.at(index_of(token)));
            for (int token = 0; token < unknown.n_staged; ++token)
                numbers.push_back(head.first_row + head.count + token);
        }
        rows_looked_up_.push_back(input.add(numbers));
    }
    if (!observed || !single) return;
    add_rows_near(input);
    ++n_summed_;
}

// Adds which rows are in the neighbourhood of the single token.
void DeviceAttention::add_rows_near(StepInput& input) {
    rows_near_.clear();
    std::vector<std::int64_t> rows;
    std::size_t n = 0;
    for (const Served& served : layers_) {
        rows.clear();
        for (DeviceHead& head : served.layer->heads()) {
            const std::vector<int>& near = head.rows_near(step_.position);
            for (std::size_t i = 0; i < index_of(kNeighbourhood); ++i)
                rows.push_back(near.empty() ? std::max(head.count - 1, 0)
                                            : near[std::min(i, near.size() - 1)]);
        }
        n += rows.size();
        rows_near_.push_back(input.add(rows));
    }
    zeros_ = input.add(std::vector<float>(n, 0.0f));
}

// Copies to the device what plan_look_up() has prepared in host memory; nothing if no rows are
// looked up.
void DeviceAttention::tell_rows_looked_up() {
    if (!written_.empty()) looked_up_->tell(written_);
}

int DeviceAttention::tensors_of_look_up(const Served& served) const {
    const auto groups = static_cast<int>(served.layer->groups().size());
    return kTensorsOfFindings + served.layer->shape().readers * groups * kTensorsOfObservation;
}

// Returns the end of the longest run of layers from `first` on for which everything that a single
// token's look-up reads and writes lies evenly apart, so that one operation serves the run.
std::size_t DeviceAttention::end_of_run(std::size_t first, std::size_t end) const {
    const Served& served = layers_[first];
    const DeviceLayer& layer = *served.layer;
    const auto continues = [&](std::size_t next) {
        const Served& other = layers_[next];
        return &other.layer->memory() == &layer.memory() && has_rows_of(*other.layer, layer) &&
               other.layer->groups().size() == 1 && !other.has_sinks &&
               other.layer->shape().readers == layer.shape().readers &&
               other.params == served.params && bool(other.predictor) == bool(served.predictor) &&
               singles_->layers[next].widths == singles_->layers[first].widths;
    };
    const bool is_even = layer.n_places() == 1 || singles_->apart;
    if (!is_even || layer.groups().size() > 1 || served.has_sinks) return first + 1;
    std::size_t next = first + 1;
    while (next < end && continues(next)) ++next;
    return next;
}

// Adds to the graph what is looked up of `layer`, and of the layers after it that the same
// operations serve; returns the first layer that they do not serve.
std::size_t DeviceAttention::add_look_up(std::size_t layer, std::size_t end, ggml_context* context,
                                         ggml_cgraph* graph) const {
    const Served& served = layers_[layer];
    const bool single = step_.is_single_in_graph();
    const std::size_t next = single ? end_of_run(layer, end) : layer + 1;
    const auto n_layers = static_cast<int>(next - layer);
    for (int reader = 0; looks_at_queries_ && reader < served.layer->shape().readers; ++reader) {
        DeviceGraph operations(context, graph, *this, served, reader, {}, step_);
        if (single)
            operations.add_observation_of_single(n_layers);
        else
            operations.add_observation();
    }
    if (looked_for_.n == 0 || !needs_findings(served)) return next;
    if (!served.predictor && !served.layer->shape().latent) {
        const std::size_t stride =
            n_layers > 1 ? rows_looked_up_[layer + 1] - rows_looked_up_[layer] : 0;
        DeviceGraph(context, graph, *this, served, 0, {}, step_)
            .add_value_squares(looked_for_.n, rows_looked_up_[layer], stride, n_layers);
        return next;
    }
    for (std::size_t i = layer; i < next; ++i)
        DeviceGraph(context, graph, *this, layers_[i], 0, {}, step_)
            .add_findings(looked_for_.n, rows_looked_up_[i]);
    return next;
}

void DeviceAttention::prepare_look_up(const UnknownTokens& unknown, bool observed, int n_parts) {
    plan_look_up(unknown, observed);
    const std::size_t n = index_of(std::max(n_parts, 1));
    layers_of_part_ = std::max<std::size_t>(1, (layers_.size() + n - 1) / n);
    launched_ = {};
    next_part_ = {};
    build_part();
}

void DeviceAttention::look_up() {
    tell_rows_looked_up();
    launch_part();
}

// Builds the graph of the next layers, as many as belong to a part and a graph has room for.
void DeviceAttention::build_part() {
    std::size_t first = launched_.end;
    Part& part = next_part_;
    part.context.reset();  // frees memory that the new part may get
    part.layers = {first, first};
    if (first == layers_.size()) return;
    part.context = device_.next_graph_context();
    part.graph = Device::new_graph(part.context.get());
    const std::size_t end = std::min(layers_.size(), first + layers_of_part_);
    while (first < end) {
        if (first > part.layers.first &&
            !Device::has_room_for(part.context.get(), tensors_of_look_up(layers_[first])))
            break;
        first = add_look_up(first, end, part.context.get(), part.graph);
    }
    part.layers.end = first;
}

// Makes the device compute the next part, once it has computed the part before.
void DeviceAttention::launch_part() {
    launched_ = next_part_.layers;
    if (launched_.first == launched_.end) return;
    device_.wait();
    if (ggml_graph_n_nodes(next_part_.graph) > 0) {
        device_.place(next_part_.graph);
        device_.launch(next_part_.graph);
    }
    if (looks_at_queries_ && step_.is_single_in_graph())
        begin_read_of_sums(launched_.first, launched_.end);
    const std::size_t begin = layers_[launched_.first].places.findings;
    const std::size_t end =
        launched_.end == layers_.size() ? found_.size() : layers_[launched_.end].places.findings;
    if (end > begin) findings_->begin_read(found_, begin, end - begin);
}

LayerRange DeviceAttention::next_part() {
    const LayerRange launched = launched_;
    if (launched.first == launched.end) return launched;
    build_part();
    device_.wait();
    launch_part();
    return launched;
}

void DeviceAttention::look_up_all(const std::vector<LookUp>& all) {
    Device& device = all.front().sequence->device_;
    for (const LookUp& each : all) {
        each.sequence->plan_look_up(each.unknown, each.observed);
        each.sequence->tell_rows_looked_up();
    }
    // Single tokens need few tensors, so one graph has room for many sequences.
    auto context = device.next_graph_context();
    ggml_cgraph* graph = Device::new_graph(context.get());
    const auto launch = [&] {
        if (ggml_graph_n_nodes(graph) == 0) return;
        device.wait();
        device.place(graph);
        device.launch(graph);
    };
    for (const LookUp& each : all) {
        const DeviceAttention& sequence = *each.sequence;
        for (std::size_t i = 0; i < sequence.layers_.size();) {
            if (ggml_graph_n_nodes(graph) > 0 &&
                !Device::has_room_for(context.get(),
                                      sequence.tensors_of_look_up(sequence.layers_[i]))) {
                launch();
                context.reset();
                context = device.next_graph_context();
                graph = Device::new_graph(context.get());
            }
            i = sequence.add_look_up(i, sequence.layers_.size(), context.get(), graph);
        }
    }
    launch();
    for (const LookUp& each : all) {
        DeviceAttention& sequence = *each.sequence;
        if (sequence.found_.size() > 0)
            sequence.findings_->begin_read(sequence.found_, 0, sequence.found_.size());
        if (each.reads_sums) sequence.begin_read_of_sums(0, sequence.layers_.size());
    }
}

}  // namespace entropykv
