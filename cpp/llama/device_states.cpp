// Saves and loads what a device store holds, in the format of the headwise store's states.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "decide/budget.hpp"
#include "llama/device_store.hpp"
#include "store/head_states.hpp"

namespace entropykv {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

float squared_norm(const float* value, int dim) {
    float sum = 0.0f;
    for (int d = 0; d < dim; ++d) sum += value[d] * value[d];
    return sum;
}

}  // namespace

std::size_t DeviceStore::state_bytes(int layer, int head) const {
    const PageLayout& layout = layers_.at(index(layer)).layout;
    return index(pages_for(count(layer, head), layout.entries)) * layout.bytes;
}

void DeviceStore::save_layer(int layer, const std::vector<std::byte*>& states) {
    complete_ledger();
    const Layer& of = layers_.at(index(layer));
    const PageLayout& layout = of.layout;
    const KernelTable& kernels = *ledger_.components().common.kernels;
    const std::vector<DeviceHead>& heads = of.rows.heads();
    const std::vector<ggml_tensor*> tensors = of.rows.tensors();
    // The rows of all heads are copied at once, because waiting for each takes longer than copying.
    Device& device = of.device->device();
    std::vector<std::array<std::size_t, 2>> begins(states.size());  // of K and V of a head
    std::size_t end = 0;
    for (std::size_t h = 0; h < states.size(); ++h)
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            begins[h][i] = end;
            end += index(heads[h].count) * tensors[i]->nb[1];
        }
    HostMemory& rows = device.saved_rows();
    rows.resize(end);
    for (std::size_t h = 0; h < states.size(); ++h)
        for (std::size_t i = 0; i < tensors.size(); ++i)
            device.begin_read(rows, begins[h][i], tensors[i],
                              index(heads[h].first_row) * tensors[i]->nb[1],
                              index(heads[h].count) * tensors[i]->nb[1]);
    device.wait();
    shared_->workers().run(static_cast<int>(states.size()), [&](int h, int) {
        std::byte* state = states[index(h)];
        std::memset(state, 0, state_bytes(layer, h));
        const Head& entries = ledger_.head(layer, h);
        std::vector<float> row(index(std::max(layout.k_dim, layout.v_dim)));
        for (int i = 0; i < entries.count(); ++i) {
            std::byte* page = state + index(layout.page_of(i)) * layout.bytes;
            const int slot = layout.slot_of(i);
            for (std::size_t of_v = 0; of_v < tensors.size(); ++of_v) {
                const ggml_tensor* tensor = tensors[of_v];
                ggml_get_type_traits(tensor->type)
                    ->to_float(rows.data() + begins[index(h)][of_v] + index(i) * tensor->nb[1],
                               row.data(), tensor->ne[0]);
                (of_v == 0 ? kernels.store_k : kernels.store_v)(layout, page, slot, row.data());
            }
            layout.positions(page)[slot] = entries.position(i);
            layout.importance(page)[slot] = entries.importance(i);
        }
    });
}

std::string DeviceStore::state_problem(int layer, int count, const std::byte* state,
                                       std::size_t size, std::int32_t end) const {
    if (count < 0 || count > ledger_.settings().max_entries)
        return "an impossible number of entries";
    const PageLayout& layout = layers_.at(index(layer)).layout;
    if (size != index(pages_for(count, layout.entries)) * layout.bytes)
        return "a size that is not that of its entries";
    std::vector<bool> seen(index(std::max(end, 0)));
    const char* problem = entries_problem(layout, state, count, seen);
    return problem == nullptr ? "" : problem;
}

void DeviceStore::load(const std::vector<int>& counts, const std::vector<std::byte*>& states) {
    // Holds the ledger's own states: what HeadLoader reads, with the numbers of the rows.
    std::vector<std::vector<std::byte>> of_ledger(states.size());
    std::vector<const std::byte*> addresses;
    std::vector<int> budgets;
    std::vector<std::pair<int, int>> heads;
    for_each_head([&](int layer, int h) { heads.emplace_back(layer, h); });
    shared_->workers().run(static_cast<int>(heads.size()), [&](int number, int) {
        const std::size_t head = index(number);
        of_ledger[head] = state_of_ledger(heads[head].first, counts.at(head), states.at(head));
    });
    for (const auto& [layer, h] : heads) {
        addresses.push_back(of_ledger[addresses.size()].data());
        budgets.push_back(budget(layer, h));
    }
    HeadLoader loader(ledger_.components());
    loader.begin(counts, addresses, budgets);
    truncate(0);
    // The budget may evict some of the entries before there are rows for them.
    for (std::size_t i = 0; i < heads.size(); ++i)
        loader.load(heads[i].first, heads[i].second, counts[i], of_ledger[i].data());
    auto first = states.begin();
    for (int layer = 0; layer < n_layers(); ++layer) {
        const auto end = first + ledger_.shape(layer).n_head_kv;
        load_rows(layer, {first, end});
        first = end;
    }
    for (const Layer& layer : layers_) layer.device->forget_positions(layer.number);
    ledger_.components().most_loaded = 0;
    peak_ = std::max(peak_, used_bytes());
}

// Returns a state of the ledger with the entries of a saved state. In the place of row numbers, it
// has the numbers of the entries in the saved state.
std::vector<std::byte> DeviceStore::state_of_ledger(int layer, int count,
                                                    const std::byte* state) const {
    const PageLayout& saved = layers_[index(layer)].layout;
    const PageLayout& own = ledger_.layout(layer);
    std::vector<std::byte> of_ledger(index(pages_for(count, own.entries)) * own.bytes);
    std::vector<float> value(index(saved.v_dim));
    for (int i = 0; i < count; ++i) {
        const std::byte* from = state + index(saved.page_of(i)) * saved.bytes;
        std::byte* to = of_ledger.data() + index(own.page_of(i)) * own.bytes;
        load_v(saved, from, saved.slot_of(i), value.data());
        own.row(to, own.slot_of(i)) = i;
        own.value_square(to, own.slot_of(i)) = squared_norm(value.data(), saved.v_dim);
        own.positions(to)[own.slot_of(i)] = saved.positions(from)[saved.slot_of(i)];
        own.importance(to)[own.slot_of(i)] = saved.importance(from)[saved.slot_of(i)];
    }
    return of_ledger;
}

// Writes the entries of a layer's heads to their first rows, in the order of the ledger. Then the
// ledger has the numbers of these rows, in the place of those in the states.
void DeviceStore::load_rows(int layer, const std::vector<std::byte*>& states) {
    const PageLayout& saved = layers_[index(layer)].layout;
    const DeviceLayer& of = rows(layer);
    const std::vector<ggml_tensor*> tensors = of.tensors();
    std::vector<std::array<std::vector<std::uint8_t>, 2>> bytes(states.size());
    shared_->workers().run(static_cast<int>(states.size()), [&](int h, int) {
        Head& entries = ledger_.components().head(layer, h);
        const int n = entries.count();
        for (std::size_t i = 0; i < tensors.size(); ++i)
            bytes[index(h)][i].resize(index(n) * tensors[i]->nb[1]);
        std::vector<float> row(index(std::max(saved.k_dim, saved.v_dim)));
        std::vector<std::int32_t> positions;
        for (int i = 0; i < n; ++i) {
            const Slot slot = entries.place(i);
            const int number = std::exchange(entries.layout().row(slot.page, slot.index), i);
            positions.push_back(entries.position(i));
            const std::byte* from = states[index(h)] + index(saved.page_of(number)) * saved.bytes;
            for (std::size_t of_v = 0; of_v < tensors.size(); ++of_v) {
                const ggml_tensor* tensor = tensors[of_v];
                (of_v == 0 ? load_k : load_v)(saved, from, saved.slot_of(number), row.data());
                ggml_quantize_chunk(tensor->type, row.data(),
                                    bytes[index(h)][of_v].data() + index(i) * tensor->nb[1], 0, 1,
                                    tensor->ne[0], nullptr);
            }
        }
        head(layer, h).hold(positions);
    });
    for (std::size_t h = 0; h < states.size(); ++h)
        for (std::size_t i = 0; i < tensors.size(); ++i)
            if (const std::vector<std::uint8_t>& all = bytes[h][i]; !all.empty())
                ggml_backend_tensor_set(tensors[i], all.data(),
                                        index(of.heads()[h].first_row) * tensors[i]->nb[1],
                                        all.size());
}

}  // namespace entropykv
