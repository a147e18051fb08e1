// Registers the store that keeps K and V on the devices of their layers.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include <map>

#include "bind/arrays.hpp"
#include "llama/device_rewrite.hpp"
#include "llama/graph_hook.hpp"
#include "page/page_codec.hpp"

namespace entropykv::bind {
namespace {

// Deletes a store without the GIL: see without_gil.
struct EndUnlocked {
    void operator()(DeviceStore* store) const {
        const py::gil_scoped_release release;
        delete store;
    }
};
using DeviceStoreHolder = std::unique_ptr<DeviceStore, EndUnlocked>;

DeviceStoreHolder make_device_store(const std::shared_ptr<Devices>& devices, const GraphHook& hook,
                                    const std::vector<LayerShape>& shapes,
                                    const std::string& kv_type,
                                    const ImportanceSettings& importance, int n_sinks,
                                    int recent_window, int max_tokens, int max_entries,
                                    const std::vector<int>& budgets, bool live,
                                    const std::vector<InputArray<float>>& predictor) {
    std::vector<DeviceLayerSource> layers;
    if (shapes.size() != hook.nodes().size())
        throw std::invalid_argument("there must be a shape for every layer");
    if (!predictor.empty() && predictor.size() != shapes.size())
        throw std::invalid_argument("a predictor has weights for every layer");
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        const AttentionNode& node = hook.nodes()[i];
        layers.push_back({shapes[i],
                          node.memory,
                          node.is_apart,
                          node.op_params,
                          node.has_sinks,
                          node.slots,
                          node.dense_queries,
                          node.rope,
                          {}});
        if (predictor.empty()) continue;
        const InputArray<float>& weights = predictor[i];
        layers.back().predictor.assign(weights.data(), weights.data() + weights.size());
    }
    StoreSettings settings;
    settings.type = kv_type_named(kv_type);
    settings.importance = importance;
    settings.protection = {n_sinks, recent_window};
    settings.max_tokens = max_tokens;
    settings.max_entries = max_entries;
    return DeviceStoreHolder(
        std::make_unique<DeviceStore>(devices, layers, settings, budgets, live).release());
}

// Releases the GIL, as every function does that may wait for the thread of a store's decisions:
// that thread waits for the GIL itself if a device is written in Python.
const py::call_guard<py::gil_scoped_release> without_gil;

// Releases the GIL for the part of a function that touches no objects of Python.
template <typename Function>
auto unlocked(Function function) {
    const py::gil_scoped_release release;
    return function();
}

void check_head(const DeviceStore& store, int layer, int head) {
    if (layer < 0 || layer >= store.ledger().n_layers() || head < 0 ||
        head >= store.ledger().shape(layer).n_head_kv)
        throw std::invalid_argument("a KV head that the model does not have");
}

// Binds a function of one KV head, which must exist.
template <typename Result>
auto of_head(Result (DeviceStore::*function)(int, int) const) {
    return [function](const DeviceStore& self, int layer, int head) {
        check_head(self, layer, head);
        return (self.*function)(layer, head);
    };
}

void register_states(py::class_<DeviceStore, DeviceStoreHolder>& store) {
    store
        .def("state_bytes", of_head(&DeviceStore::state_bytes), py::arg("layer"),
             py::arg("kv_head"))
        .def(
            "save_layer",
            [](DeviceStore& self, int layer) {
                check_head(self, layer, 0);
                std::vector<py::bytes> states;
                std::vector<std::byte*> addresses;
                for (int head = 0; head < self.ledger().shape(layer).n_head_kv; ++head) {
                    states.emplace_back(nullptr, self.state_bytes(layer, head));
                    addresses.push_back(
                        reinterpret_cast<std::byte*>(PyBytes_AS_STRING(states.back().ptr())));
                }
                unlocked([&] { self.save_layer(layer, addresses); });
                return states;
            },
            py::arg("layer"))
        .def(
            "state_problem",
            [](const DeviceStore& self, int layer, int count, const py::buffer& state,
               std::int32_t end) {
                check_head(self, layer, 0);
                const WritableBytes bytes = bytes_of(state);
                return self.state_problem(layer, count, bytes.data, bytes.size, end);
            },
            py::arg("layer"), py::arg("count"), py::arg("state"), py::arg("end"))
        .def(
            "load",
            [](DeviceStore& self, const std::vector<int>& counts,
               const std::vector<py::buffer>& states) {
                const std::vector<std::byte*> addresses = addresses_of<std::byte>(states);
                unlocked([&] { self.load(counts, addresses); });
            },
            py::arg("counts"), py::arg("states"));
}

}  // namespace

void register_device_store(py::module_& m) {
    m.def(
        "device_rows",
        [](const LayerShape& shape, const std::string& kv_type,
           const std::vector<std::vector<int>>& budgets, int max_tokens, int max_entries,
           int n_places) {
            const int multiple =
                row_multiple(shape, ggml_type_of(kv_type_named(kv_type)), kRowAlignment);
            std::vector<std::vector<int>> head_rows;
            for (const std::vector<int>& of_layer : budgets)
                head_rows.push_back(
                    rows_of_heads(of_layer, max_tokens, max_entries, multiple, n_places));
            return rows_of_layers(head_rows, n_places);
        },
        py::arg("shape"), py::arg("kv_type"), py::arg("budgets"), py::arg("max_tokens"),
        py::arg("max_entries"), py::arg("n_places") = 1);
    m.def(
        "feature_count",
        [](const LayerShape& shape, const RopeParams& rope) {
            return feature_shape(shape.k_dim, shape.v_dim, shape.latent, rope).n;
        },
        py::arg("shape"), py::arg("rope"));
    py::class_<Devices, std::shared_ptr<Devices>>(m, "Devices")
        .def(py::init<int, int>(), py::arg("n_threads"), py::arg("n_places"))
        .def("close", &Devices::close)
        .def_property_readonly("scratch_bytes", &Devices::scratch_bytes)
        .def_property_readonly("on_host", &Devices::on_host)
        .def_property_readonly("traffic", [](const Devices& self) {
            const DeviceTraffic traffic = self.traffic();
            return std::map<std::string, std::size_t>{{"computed", traffic.computed},
                                                      {"uploads", traffic.uploads},
                                                      {"downloads", traffic.downloads}};
        });
    py::class_<DeviceStore, DeviceStoreHolder> store(m, "DeviceStore");
    register_states(store);
    store
        .def(py::init(&make_device_store), py::arg("devices"), py::arg("hook"), py::arg("layers"),
             py::arg("kv_type"), py::arg("importance"), py::arg("n_sinks"),
             py::arg("recent_window"), py::arg("max_tokens"), py::arg("max_entries"),
             py::arg("budgets"), py::arg("live") = true,
             py::arg("predictor") = std::vector<InputArray<float>>{})
        .def_static(
            "resize",
            [](const std::vector<DeviceStore*>& stores, const std::vector<int>& budgets,
               int n_sinks, int recent_window) {
                DeviceStore::resize(stores, budgets, {n_sinks, recent_window});
            },
            py::arg("stores"), py::arg("budgets"), py::arg("n_sinks"), py::arg("recent_window"),
            without_gil)
        .def("commit_step", &DeviceStore::commit_step, without_gil)
        .def("most_drafts", &DeviceStore::most_drafts, py::arg("position"), py::arg("wanted"))
        .def("settle_drafts", &DeviceStore::settle_drafts, py::arg("n_accepted"), without_gil)
        .def("rotation_problem", &DeviceStore::rotation_problem, py::arg("ropes"), without_gil)
        .def("rebase", &DeviceStore::rebase, py::arg("ropes"), py::arg("n_sinks"),
             py::arg("old_shift"), py::arg("new_shift"), without_gil)
        .def("release", &DeviceStore::release, without_gil)
        .def("acquire", &DeviceStore::acquire, py::arg("place"), without_gil)
        .def("truncate", &DeviceStore::truncate, py::arg("position"), without_gil)
        .def(
            "positions",
            [](const DeviceStore& self, int layer, int head) {
                check_head(self, layer, head);
                return to_array(self.positions(layer, head));
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "importance",
            [](DeviceStore& self, int layer, int head) {
                check_head(self, layer, head);
                unlocked([&] { self.complete_ledger(); });
                std::vector<float> importance = importance_of(self.ledger().head(layer, head));
                for (float& value : importance)
                    value = self.ledger().settings().importance.score_of(value);
                return to_array(importance);
            },
            py::arg("layer"), py::arg("kv_head"))
        .def("budget", of_head(&DeviceStore::budget), py::arg("layer"), py::arg("kv_head"))
        .def("count", of_head(&DeviceStore::count), py::arg("layer"), py::arg("kv_head"))
        .def_property("evicted", &DeviceStore::evicted, &DeviceStore::set_evicted)
        .def_property_readonly("is_live",
                               [](const DeviceStore& self) { return self.n_layers() > 0; })
        .def_property_readonly("entries", &DeviceStore::entries)
        .def_property_readonly("budget_bytes", &DeviceStore::budget_bytes)
        .def_property_readonly("used_bytes", &DeviceStore::used_bytes)
        .def_property_readonly("peak_bytes", &DeviceStore::peak_bytes)
        .def_property_readonly("staging_bytes", &DeviceStore::staging_bytes)
        .def_property_readonly("scratch_bytes", &DeviceStore::scratch_bytes)
        .def_property_readonly("device_bytes", &DeviceStore::device_bytes)
        .def_property_readonly(
            "windows_whole_from",
            [](const DeviceStore& self) { return self.ledger().windows_whole_from(); })
        .def_property_readonly("eviction_seconds", &DeviceStore::eviction_seconds);
    py::class_<DeviceBatch>(m, "DeviceBatch")
        .def(py::init<>())
        .def("clear", &DeviceBatch::clear)
        .def("commit", &DeviceBatch::commit, without_gil)
        .def("add", &DeviceBatch::add, py::arg("store"), py::arg("n_tokens"), py::arg("position"),
             py::arg("rope_position"), py::arg("n_drafts") = 0, py::arg("see_all") = false,
             without_gil);
}

}  // namespace entropykv::bind
