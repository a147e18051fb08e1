// Saves and loads what a device store holds, in the format of the headwise store's states.
#include <algorithm>
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

void DeviceStore::save_head(int layer, int h, std::byte* state) {
    complete_ledger();
    const Layer& of = layers_.at(index(layer));
    const PageLayout& layout = of.layout;
    const KernelTable& kernels = *ledger_.components().common.kernels;
    const std::vector<float> keys = of.rows.read(of.rows.k(), h);
    const std::vector<float> values =
        layout.latent ? std::vector<float>{} : of.rows.read(of.rows.v(), h);
    const Head& entries = ledger_.head(layer, h);
    std::memset(state, 0, state_bytes(layer, h));
    for (int i = 0; i < entries.count(); ++i) {
        std::byte* page = state + index(layout.page_of(i)) * layout.bytes;
        const int slot = layout.slot_of(i);
        kernels.store_k(layout, page, slot, keys.data() + index(i * layout.k_dim));
        if (!layout.latent)
            kernels.store_v(layout, page, slot, values.data() + index(i * layout.v_dim));
        layout.positions(page)[slot] = entries.position(i);
        layout.importance(page)[slot] = entries.importance(i);
    }
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
    // The ledger's own states: what HeadLoader reads, with the numbers of the rows.
    std::vector<std::vector<std::byte>> of_ledger;
    std::vector<const std::byte*> addresses;
    std::vector<int> budgets;
    std::size_t next = 0;
    for_each_head([&](int layer, int h) {
        const PageLayout& saved = layers_[index(layer)].layout;
        const PageLayout& own = ledger_.layout(layer);
        const int n = counts.at(next);
        std::vector<std::byte> state(index(pages_for(n, own.entries)) * own.bytes);
        std::vector<float> value(index(saved.v_dim));
        for (int i = 0; i < n; ++i) {
            const std::byte* from = states.at(next) + index(saved.page_of(i)) * saved.bytes;
            std::byte* to = state.data() + index(own.page_of(i)) * own.bytes;
            load_v(saved, from, saved.slot_of(i), value.data());
            own.row(to, own.slot_of(i)) = i;
            own.value_square(to, own.slot_of(i)) = squared_norm(value.data(), saved.v_dim);
            own.positions(to)[own.slot_of(i)] = saved.positions(from)[saved.slot_of(i)];
            own.importance(to)[own.slot_of(i)] = saved.importance(from)[saved.slot_of(i)];
        }
        of_ledger.push_back(std::move(state));
        addresses.push_back(of_ledger.back().data());
        budgets.push_back(budget(layer, h));
        ++next;
    });
    HeadLoader loader(ledger_.components());
    loader.begin(counts, addresses, budgets);
    truncate(0);
    next = 0;
    for_each_head([&](int layer, int h) {
        // The budget may evict some before there are rows for them.
        loader.load(layer, h, counts[next], of_ledger[next].data());
        load_rows(layer, h, states[next]);
        ++next;
    });
    for (const Layer& layer : layers_) layer.device->forget_positions(layer.number);
    ledger_.components().most_loaded = 0;
    peak_ = std::max(peak_, used_bytes());
}

// Writes the entries of a head to its first rows, in the order of the ledger, which has their
// numbers in a state.
void DeviceStore::load_rows(int layer, int h, const std::byte* state) {
    const PageLayout& saved = layers_[index(layer)].layout;
    Head& entries = ledger_.components().head(layer, h);
    const int n = entries.count();
    std::vector<float> keys(index(n * saved.k_dim));
    std::vector<float> values(index(n * saved.v_dim));
    std::vector<std::int32_t> positions(index(n));
    for (int i = 0; i < n; ++i) {
        const Slot slot = entries.place(i);
        const int number = std::exchange(entries.layout().row(slot.page, slot.index), i);
        positions[index(i)] = entries.position(i);
        const std::byte* from = state + index(saved.page_of(number)) * saved.bytes;
        load_k(saved, from, saved.slot_of(number), keys.data() + index(i * saved.k_dim));
        load_v(saved, from, saved.slot_of(number), values.data() + index(i * saved.v_dim));
    }
    DeviceLayer& of = rows(layer);
    of.write(of.k(), h, keys);
    if (!saved.latent) of.write(of.v(), h, values);
    head(layer, h).hold(positions);
}

}  // namespace entropykv
