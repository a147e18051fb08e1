// The store whose KV heads keep entries of their own, with the attention over them.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "attention/headwise.hpp"
#include "bind/arrays.hpp"
#include "page/page_codec.hpp"
#include "store/head_rows.hpp"
#include "store/losses.hpp"

namespace entropykv::bind {

namespace {

// An array of [n_tokens][heads][dim]; another shape has no tokens, and is refused by attend().
RowsOfTokens rows_of(const InputArray<float>& rows) {
    if (rows.ndim() != 3) throw std::invalid_argument("q, k and v must be [n_tokens][heads][dim]");
    return {{reinterpret_cast<const std::byte*>(rows.data()),
             static_cast<std::size_t>(rows.strides(0)), static_cast<std::size_t>(rows.strides(1))},
            static_cast<int>(rows.shape(0)),
            static_cast<int>(rows.shape(1)),
            static_cast<int>(rows.shape(2))};
}

std::optional<RowsOfTokens> rows_of(const std::optional<InputArray<float>>& rows) {
    if (!rows) return std::nullopt;
    return rows_of(*rows);
}

// One value for every query head, or none.
const float* per_head(const std::optional<InputArray<float>>& values, int n_head,
                      const char* problem) {
    if (!values) return nullptr;
    if (values->size() != n_head) throw std::invalid_argument(problem);
    return values->data();
}

py::array_t<float> attend(Headwise& self, int layer, const InputArray<float>& q,
                          const std::optional<InputArray<float>>& k,
                          const std::optional<InputArray<float>>& v, float scale, float softcap,
                          const std::optional<InputArray<float>>& sinks, int position,
                          const std::optional<InputArray<float>>& slopes, int reader, int n_echo) {
    const LayerShape& shape = self.shape_of(layer);
    const Headwise::MicroBatch batch{rows_of(q), rows_of(k), rows_of(v), position, n_echo};
    const AttentionParams params{
        scale, softcap, per_head(sinks, shape.n_head, "sinks must be one for every query head"),
        per_head(slopes, shape.n_head, "slopes must be one for every query head")};
    py::array_t<float> output({batch.q.n_tokens, shape.n_head, shape.v_dim});
    self.attend(layer, reader, batch, params, output.mutable_data());
    return output;
}

std::unique_ptr<Headwise> make_store(
    const std::vector<LayerShape>& layers, const std::string& kv_type,
    const ImportanceSettings& importance, int n_sinks, int recent_window, int max_tokens,
    int max_entries, int n_threads, bool own_windows, bool counts_dropped, bool shared_choice,
    const std::optional<std::string>& kernels, std::vector<RopeParams> ropes,
    const std::optional<FreezeSettings>& freezing, const SequencePool* pool) {
    const StoreSettings settings{kv_type_named(kv_type),
                                 importance,
                                 {n_sinks, recent_window},
                                 own_windows,
                                 counts_dropped,
                                 max_tokens,
                                 max_entries,
                                 std::move(ropes),
                                 freezing};
    auto store = std::make_unique<Headwise>(layers, settings, n_threads, kernels, pool);
    store->attention.set_shared_choice(shared_choice);
    return store;
}

void register_figures(py::class_<Headwise>& store) {
    store.def_property_readonly("entries", [](const Headwise& s) { return s.store.entries(); })
        .def_property_readonly("evicted", [](const Headwise& s) { return s.store.evicted(); })
        .def_property_readonly("windows_whole_from",
                               [](const Headwise& s) { return s.store.windows_whole_from(); })
        .def_property_readonly("eviction_seconds",
                               [](const Headwise& s) { return s.eviction_seconds(); })
        .def_property_readonly("budget_bytes",
                               [](const Headwise& s) { return s.store.share().budget_bytes(); })
        .def_property_readonly("used_bytes",
                               [](const Headwise& s) { return s.store.share().used_bytes(); })
        .def_property_readonly("peak_bytes",
                               [](const Headwise& s) { return s.store.share().peak_bytes(); })
        .def_property_readonly(
            "mapped_bytes",
            [](const Headwise& s) { return s.store.share().pool().pages().mapped_bytes(); })
        .def_property_readonly(
            "staging_bytes",
            [](const Headwise& s) { return s.store.share().pool().staging().bytes(); })
        .def_property_readonly("scratch_bytes", &Headwise::scratch_bytes);
}

void register_heads(py::class_<Headwise>& store) {
    store
        .def(
            "positions",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return to_array(positions_of(self.store.head(layer, head)));
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "importance",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                std::vector<float> importance = importance_of(self.store.head(layer, head));
                for (float& value : importance)
                    value = self.store.settings().importance.score_of(value);
                return to_array(importance);
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "budget",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return self.store.head(layer, head).budget();
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "count",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return self.store.head(layer, head).count();
            },
            py::arg("layer"), py::arg("kv_head"));
}

void register_losses(py::class_<Headwise>& store) {
    store
        .def(
            "measure_losses",
            [](Headwise& self, const std::vector<int>& knots) {
                measure_losses(self.store.parts(), knots);
            },
            py::arg("knots"))
        .def(
            "losses",
            [](const Headwise& self, bool of_held) {
                return to_array(last_losses(self.store.parts(), of_held));
            },
            py::arg("of_held") = false);
}

}  // namespace

void register_headwise_store(py::module_& m) {
    py::class_<Headwise> store(m, "HeadwiseStore");
    register_headwise_observation(store);
    register_headwise_state(store);
    register_headwise_sharing(store);
    register_headwise_freezing(store);
    register_headwise_prediction(store);
    register_figures(store);
    store
        .def(py::init(&make_store), py::arg("layers"), py::arg("kv_type"), py::arg("importance"),
             py::arg("n_sinks"), py::arg("recent_window"), py::arg("max_tokens"),
             py::arg("max_entries"), py::arg("n_threads"), py::arg("own_windows") = false,
             py::arg("counts_dropped") = false, py::arg("shared_choice") = false,
             py::arg("kernels") = py::none(), py::arg("ropes") = std::vector<RopeParams>{},
             py::arg("freezing") = py::none(), py::arg("pool") = py::none())
        .def("give_up_share", &Headwise::give_up_share)
        .def(
            "set_budgets",
            [](Headwise& self, const std::vector<int>& budgets, std::size_t pool_pages, int n_sinks,
               int recent_window) {
                const py::gil_scoped_release release;
                self.set_budgets(budgets, pool_pages, {n_sinks, recent_window});
            },
            py::arg("budgets"), py::arg("pool_pages"), py::arg("n_sinks"), py::arg("recent_window"))
        .def(
            "begin",
            [](Headwise& self, int n_tokens, int position, int rope_position, int n_echo) {
                self.attention.begin(n_tokens, position, rope_position, n_echo);
            },
            py::arg("n_tokens"), py::arg("position"), py::arg("rope_position"),
            py::arg("n_echo") = 0)
        .def("attend", &attend, py::arg("layer"), py::arg("q"), py::arg("k"), py::arg("v"),
             py::arg("scale"), py::arg("softcap") = 0.0f, py::arg("sinks") = py::none(),
             py::arg("position") = 0, py::arg("slopes") = py::none(), py::arg("reader") = 0,
             py::arg("n_echo") = 0)
        .def("track_entropy", &Headwise::track_entropy, py::arg("on"))
        .def(
            "entropies",
            [](const Headwise& self, int layer) { return to_array(self.mean_entropies(layer)); },
            py::arg("layer"))
        .def(
            "rebase",
            [](Headwise& self, const std::vector<RopeParams>& ropes, int n_sinks, int old_shift,
               int new_shift) {
                const py::gil_scoped_release release;
                self.rebase(ropes, n_sinks, old_shift, new_shift);
            },
            py::arg("ropes"), py::arg("n_sinks"), py::arg("old_shift"), py::arg("new_shift"))
        .def(
            "truncate", [](Headwise& self, int position) { self.store.truncate(position); },
            py::arg("position"));
    register_heads(store);
    register_losses(store);
}

}  // namespace entropykv::bind
