#include "llama/device_store.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#include "decide/budget.hpp"
#include "platform/half.hpp"
#include "store/head_states.hpp"

namespace entropykv {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

// Entries of the ledger have so many values; two of them are used.
constexpr int kLedgerDim = 16;
// A row's number takes two values, each of which f16 holds exactly.
constexpr int kRowBase = 2048;

std::vector<LayerShape> ledger_shapes(const std::vector<DeviceLayerSource>& layers) {
    std::vector<LayerShape> shapes;
    for (const DeviceLayerSource& layer : layers)
        shapes.push_back({layer.shape.n_head_kv, layer.shape.n_head_kv, kLedgerDim, kLedgerDim});
    return shapes;
}

StoreSettings ledger_settings(StoreSettings settings) {
    const ImportanceSettings& importance = settings.importance;
    const Evidence evidence = importance.measure().evidence;
    const bool of_shares = importance.measure().statistic == Statistic::probability ||
                           importance.measure().statistic == Statistic::squared_probability;
    if (importance.distinct || importance.predicts() || !of_shares ||
        (evidence != Evidence::queries && evidence != Evidence::position))
        throw std::invalid_argument("a measure that needs keys on the host");
    settings.type = KvType::f16;
    settings.ropes.clear();
    return settings;
}

void write_row_number(float* key, int row) {
    std::fill_n(key, kLedgerDim, 0.0f);
    key[0] = static_cast<float>(row / kRowBase);
    key[1] = static_cast<float>(row % kRowBase);
}

int row_number(const float* key) {
    return static_cast<int>(key[0]) * kRowBase + static_cast<int>(key[1]);
}

// Writes a value of the ledger with the squared norm of the entry's value. Two values hold it more
// exactly than one f16.
void write_norm(float* value, float squared) {
    std::fill_n(value, kLedgerDim, 0.0f);
    const float norm = std::sqrt(std::max(squared, 0.0f));
    const float rounded = half_to_float(float_to_half(std::min(norm, 60000.0f)));
    // The first must not be larger than the norm, since squares only add up.
    value[0] =
        rounded > norm ? half_to_float(float_to_half(norm * (1.0f - 1.0f / 1024.0f))) : rounded;
    value[1] = std::sqrt(std::max(norm * norm - value[0] * value[0], 0.0f));
}

ggml_type type_of(KvType type) { return type == KvType::q8_0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16; }

float squared_norm(const float* value, int dim) {
    float sum = 0.0f;
    for (int d = 0; d < dim; ++d) sum += value[d] * value[d];
    return sum;
}

}  // namespace

DeviceStore::DeviceStore(const std::vector<DeviceLayerSource>& layers,
                         const StoreSettings& settings, const std::vector<int>& budgets,
                         int n_threads)
    : ledger_(ledger_shapes(layers), ledger_settings(settings)), type_(settings.type) {
    ledger_.set_workers(1, *available_kernels().back());
    ledger_.set_budgets(budgets, pages_of(budgets), settings.protection);
    std::vector<LayerShape> shapes;
    for (const DeviceLayerSource& layer : layers) shapes.push_back(layer.shape);
    const std::vector<PageLayout> layouts = page_layouts(shapes, type_);
    layers_.reserve(layers.size());
    std::size_t next = 0;
    for (const DeviceLayerSource& layer : layers) {
        std::vector<int> head_rows;
        for (int head = 0; head < layer.shape.n_head_kv; ++head)
            head_rows.push_back(
                device_rows(budgets.at(next++), settings.max_tokens, settings.max_entries));
        add_layer(layer, head_rows, n_threads);
        layers_.back().layout = layouts[layers_.size() - 1];
    }
    check_supported(layers);
}

void DeviceStore::add_layer(const DeviceLayerSource& source, const std::vector<int>& head_rows,
                            int n_threads) {
    const auto same = [&](const auto& device) { return device->memory() == source.memory; };
    auto found = std::find_if(devices_.begin(), devices_.end(), same);
    if (found == devices_.end())
        found = devices_.insert(devices_.end(),
                                std::make_unique<DeviceAttention>(source.memory, n_threads));
    layers_.push_back(
        {DeviceLayer(source.shape, type_of(type_), head_rows, source.memory), found->get(), {}});
}

void DeviceStore::check_supported(const std::vector<DeviceLayerSource>& layers) {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        for (const int n_tokens : {1, ledger_.settings().max_tokens}) {
            const std::string op =
                layers_[i].device->unsupported(layers_[i].rows, ledger_.settings().importance,
                                               layers[i].op_params.data(), n_tokens);
            if (!op.empty())
                throw std::runtime_error("its device " + layers_[i].device->name() +
                                         " cannot compute " + op);
        }
    }
}

std::size_t DeviceStore::pages_of(const std::vector<int>& budgets) const {
    std::size_t next = 0;
    return ledger_.components().sum_over_heads([&](const Head& head) {
        return index(pages_for(budgets.at(next++), head.layout().entries));
    });
}

void DeviceStore::reserve(int n_tokens, std::int32_t position) {
    fault_.clear();
    const Measure& measure = ledger_.settings().importance.measure();
    step_ = {n_tokens, position,
             measure.observes() && (n_tokens > 1 || position % kScoringInterval == 0)};
    ledger_.reserve(n_tokens, position + n_tokens - 1, false);
    for (Layer& layer : layers_)
        for (DeviceHead& head : layer.rows.heads()) head.stage(n_tokens);
}

void DeviceStore::attend(int layer, const DeviceNode& node) noexcept {
    if (!fault_.empty()) return;
    try {
        Layer& of = layers_.at(index(layer));
        if (node.q->ne[1] != step_.n_tokens)
            throw std::runtime_error("a graph reads another number of tokens than the session");
        commit(layer, of.device->run(of.rows, ledger_.settings().importance, node, step_));
    } catch (const std::bad_alloc&) {
        fault_ = "a device has no memory left to compute attention";
    } catch (const std::exception& error) {
        fault_ = error.what();
    }
}

void DeviceStore::check_step() const {
    if (!fault_.empty()) throw std::runtime_error(fault_);
}

void DeviceStore::commit(int layer, const DeviceFindings& found) {
    DeviceLayer& rows = layers_[index(layer)].rows;
    for (int h = 0; h < rows.shape().n_head_kv; ++h) {
        DeviceHead& head = rows.heads()[index(h)];
        const float* squares = found.value_squares.empty()
                                   ? nullptr
                                   : found.value_squares.data() + index(h * step_.n_tokens);
        stage(layer, h, squares);
        const float* observed = nullptr;
        if (!found.observed.empty()) {
            const std::vector<float>& by_row = found.observed[index(h)];
            observed_.clear();
            for (const std::vector<int>* some : {&head.entry_rows, &head.staged_rows})
                for (const int row : *some) observed_.push_back(by_row[index(row)]);
            observed = observed_.data();
        }
        ledger_.commit(layer, h, step_.n_tokens, observed, nullptr, 0.0f, 0);
        find_rows(layer, h);
    }
    peak_ = std::max(peak_, used_bytes());
}

// Puts the micro-batch of a head into the ledger's staging area.
void DeviceStore::stage(int layer, int h, const float* value_squares) {
    const DeviceHead& head = layers_[index(layer)].rows.heads()[index(h)];
    const PageLayout& layout = ledger_.layout(layer);
    const KernelTable& kernels = *ledger_.components().common.kernels;
    float values[kLedgerDim];
    for (int token = 0; token < step_.n_tokens; ++token) {
        std::byte* page = ledger_.staging(layer, h)[layout.page_of(token)];
        const int slot = layout.slot_of(token);
        write_row_number(values, head.staged_rows[index(token)]);
        kernels.store_k(layout, page, slot, values);
        write_norm(values, value_squares == nullptr ? 0.0f : value_squares[token]);
        kernels.store_v(layout, page, slot, values);
        layout.positions(page)[slot] = step_.position + token;
        layout.importance(page)[slot] = 0.0f;
    }
}

void DeviceStore::find_rows(int layer, int h) {
    DeviceHead& head = layers_[index(layer)].rows.heads()[index(h)];
    const Head& entries = ledger_.head(layer, h);
    const auto before = static_cast<int>(head.entry_rows.size());
    const auto n_staged = static_cast<int>(head.staged_rows.size());
    if (entries.count() == before + n_staged) {  // nothing was evicted
        for (int token = 0; token < n_staged; ++token) {
            const int row = head.staged_rows[index(token)];
            head.positions[index(row)] = static_cast<float>(step_.position + token);
            head.entry_rows.push_back(row);
        }
    } else {
        std::fill(head.positions.begin(), head.positions.end(), kFreeRow);
        head.entry_rows.clear();
        float key[kLedgerDim];
        for (int i = 0; i < entries.count(); ++i) {
            const Slot slot = entries.place(i);
            load_k(entries.layout(), slot.page, slot.index, key);
            const int row = row_number(key);
            head.entry_rows.push_back(row);
            head.positions.at(index(row)) = static_cast<float>(entries.position(i));
        }
    }
    head.staged_rows.clear();
}

void DeviceStore::set_budgets(const std::vector<int>& budgets, const Protection& protection) {
    std::size_t next = 0;
    for (const Layer& layer : layers_)
        for (const DeviceHead& head : layer.rows.heads()) {
            const int needed = device_rows(budgets.at(next++), ledger_.settings().max_tokens,
                                           ledger_.settings().max_entries);
            if (needed > head.rows())
                throw std::invalid_argument("a budget that has no rows on the device");
        }
    ledger_.set_budgets(budgets, pages_of(budgets), protection);
    for (int layer = 0; layer < n_layers(); ++layer)
        for (int head = 0; head < ledger_.shape(layer).n_head_kv; ++head) find_rows(layer, head);
}

void DeviceStore::truncate(std::int32_t position) {
    ledger_.truncate(position);
    for (int layer = 0; layer < n_layers(); ++layer)
        for (int head = 0; head < ledger_.shape(layer).n_head_kv; ++head) {
            layers_[index(layer)].rows.heads()[index(head)].staged_rows.clear();
            find_rows(layer, head);
        }
}

void DeviceStore::release() noexcept {
    layers_.clear();
    devices_.clear();
}

std::size_t DeviceStore::budget_bytes() const {
    std::size_t bytes = 0;
    for (int layer = 0; layer < n_layers(); ++layer)
        for (int head = 0; head < ledger_.shape(layer).n_head_kv; ++head)
            bytes += index(budget(layer, head)) * layers_[index(layer)].rows.entry_bytes();
    return bytes;
}

std::size_t DeviceStore::used_bytes() const {
    std::size_t bytes = 0;
    for (int layer = 0; layer < n_layers(); ++layer)
        for (int head = 0; head < ledger_.shape(layer).n_head_kv; ++head)
            bytes += index(count(layer, head)) * layers_[index(layer)].rows.entry_bytes();
    return bytes;
}

std::size_t DeviceStore::staging_bytes() const {
    std::size_t bytes = 0;
    for (const Layer& layer : layers_) bytes += layer.rows.bytes();
    return bytes - std::min(bytes, budget_bytes());
}

std::size_t DeviceStore::scratch_bytes() const {
    std::size_t bytes = ledger_.components().scratch_bytes() + ledger_.share().budget_bytes() +
                        ledger_.share().pool().staging().bytes();
    for (const auto& device : devices_) bytes += device->scratch_bytes();
    for (const Layer& layer : layers_)
        for (const DeviceHead& head : layer.rows.heads())
            bytes += index(head.rows()) * (sizeof(float) + 2 * sizeof(int));
    return bytes;
}

std::vector<std::pair<std::string, std::size_t>> DeviceStore::device_bytes() const {
    std::vector<std::pair<std::string, std::size_t>> of_devices;
    for (const auto& device : devices_) {
        std::size_t bytes = device->scratch_bytes();
        for (const Layer& layer : layers_)
            if (layer.device == device.get()) bytes += layer.rows.bytes();
        of_devices.emplace_back(device->name(), bytes);
    }
    return of_devices;
}

std::size_t DeviceStore::state_bytes(int layer, int head) const {
    const PageLayout& layout = layers_.at(index(layer)).layout;
    return index(pages_for(count(layer, head), layout.entries)) * layout.bytes;
}

void DeviceStore::save_head(int layer, int h, std::byte* state) {
    const Layer& of = layers_.at(index(layer));
    const PageLayout& layout = of.layout;
    const KernelTable& kernels = *ledger_.components().common.kernels;
    const std::vector<float> keys = of.rows.read(of.rows.k(), h);
    const std::vector<float> values = of.rows.read(of.rows.v(), h);
    const Head& entries = ledger_.head(layer, h);
    std::memset(state, 0, state_bytes(layer, h));
    for (int i = 0; i < entries.count(); ++i) {
        std::byte* page = state + index(layout.page_of(i)) * layout.bytes;
        const int slot = layout.slot_of(i);
        const int row = of.rows.heads()[index(h)].entry_rows[index(i)];
        kernels.store_k(layout, page, slot, keys.data() + index(row * layout.k_dim));
        kernels.store_v(layout, page, slot, values.data() + index(row * layout.v_dim));
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
    for (int i = 0; i < count; ++i) {
        const std::byte* page = state + index(layout.page_of(i)) * layout.bytes;
        const int slot = layout.slot_of(i);
        const auto position = static_cast<std::size_t>(layout.positions(page)[slot]);
        if (position >= seen.size()) return "a position that was never read";
        if (seen[position]) return "a position twice";
        seen[position] = true;
        const float importance = layout.importance(page)[slot];
        if (!std::isfinite(importance) || importance < 0.0f) return "an impossible importance";
    }
    return {};
}

int DeviceStore::most_loaded(int layer, int head) const {
    return layers_.at(index(layer)).rows.heads().at(index(head)).rows();
}

void DeviceStore::load(const std::vector<int>& counts, const std::vector<std::byte*>& states) {
    // The ledger's own states: what HeadLoader reads, with the numbers of the rows.
    std::vector<std::vector<std::byte>> of_ledger;
    std::vector<const std::byte*> addresses;
    std::vector<int> budgets;
    const KernelTable& kernels = *ledger_.components().common.kernels;
    std::size_t next = 0;
    for (int layer = 0; layer < n_layers(); ++layer) {
        const PageLayout& saved = layers_[index(layer)].layout;
        const PageLayout& own = ledger_.layout(layer);
        for (int h = 0; h < ledger_.shape(layer).n_head_kv; ++h, ++next) {
            const int n = counts.at(next);
            std::vector<std::byte> state(index(pages_for(n, own.entries)) * own.bytes);
            std::vector<float> row(index(saved.v_dim));
            float values[kLedgerDim];
            for (int i = 0; i < n; ++i) {
                const std::byte* from = states.at(next) + index(saved.page_of(i)) * saved.bytes;
                std::byte* to = state.data() + index(own.page_of(i)) * own.bytes;
                load_v(saved, from, saved.slot_of(i), row.data());
                write_row_number(values, i);
                kernels.store_k(own, to, own.slot_of(i), values);
                write_norm(values, squared_norm(row.data(), saved.v_dim));
                kernels.store_v(own, to, own.slot_of(i), values);
                own.positions(to)[own.slot_of(i)] = saved.positions(from)[saved.slot_of(i)];
                own.importance(to)[own.slot_of(i)] = saved.importance(from)[saved.slot_of(i)];
            }
            of_ledger.push_back(std::move(state));
            addresses.push_back(of_ledger.back().data());
            budgets.push_back(budget(layer, h));
        }
    }
    HeadLoader loader(ledger_.components());
    loader.begin(counts, addresses, budgets);
    truncate(0);
    next = 0;
    for (int layer = 0; layer < n_layers(); ++layer) {
        DeviceLayer& rows = layers_[index(layer)].rows;
        const PageLayout& saved = layers_[index(layer)].layout;
        for (int h = 0; h < ledger_.shape(layer).n_head_kv; ++h, ++next) {
            const int n = counts[next];
            std::vector<float> keys(index(n * saved.k_dim));
            std::vector<float> values(index(n * saved.v_dim));
            for (int i = 0; i < n; ++i) {
                const std::byte* from = states[next] + index(saved.page_of(i)) * saved.bytes;
                load_k(saved, from, saved.slot_of(i), keys.data() + index(i * saved.k_dim));
                load_v(saved, from, saved.slot_of(i), values.data() + index(i * saved.v_dim));
            }
            rows.write(rows.k(), h, keys);
            rows.write(rows.v(), h, values);
            loader.load(layer, h, n, of_ledger[next].data());
            // Entries lie in the rows of their numbers in the state, unless the budget evicts them.
            rows.heads()[index(h)].staged_rows.clear();
            rows.heads()[index(h)].entry_rows.assign(index(ledger_.head(layer, h).count()) + 1, 0);
            find_rows(layer, h);
        }
    }
    ledger_.components().most_loaded = 0;
    peak_ = std::max(peak_, used_bytes());
}

}  // namespace entropykv
