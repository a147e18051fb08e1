// The Python face of the extension: the only file that includes pybind11.
#include <ggml.h>
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>

#include "attention/attention_batch.hpp"
#include "decide/budget.hpp"
#include "llama/built_for.hpp"
#include "llama/flat_store.hpp"
#include "llama/gate_hook.hpp"
#include "llama/graph_hook.hpp"
#include "llama/rope_probe.hpp"
#include "llama/weight_hook.hpp"
#include "llama/window_probe.hpp"
#include "platform/bandwidth.hpp"
#include "store/cache_map.hpp"
#include "store/head_store.hpp"
#include "store/rope.hpp"

namespace py = pybind11;
using namespace entropykv;  // NOLINT: this file only registers

namespace {

template <typename T>
py::array_t<T> to_array(const std::vector<T>& values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// A copy in rows of any shape.
py::array_t<float> to_rows(const std::vector<float>& values, std::vector<py::ssize_t> shape) {
    return py::array_t<float>(std::move(shape), values.data());
}

template <typename T>
using InputArray = py::array_t<T, py::array::c_style | py::array::forcecast>;

const KernelTable& kernels_named(const std::optional<std::string>& name) {
    const auto tables = available_kernels();
    if (!name) return *tables.back();
    for (const KernelTable* table : tables)
        if (*name == table->name) return *table;
    throw std::invalid_argument("this machine has no kernels named " + *name);
}

KvType kv_type_named(const std::string& name) {
    if (name == "f16") return KvType::f16;
    if (name == "q8_0") return KvType::q8_0;
    throw std::invalid_argument("kv_type must be f16 or q8_0, not " + name);
}

// What sequences of one model share.
struct SequencePool {
    std::shared_ptr<StorePool> store;
    std::shared_ptr<Attention::Workers> workers = std::make_shared<Attention::Workers>();
};

// A HeadStore with the attention over it; one of the sequences of a pool, if there is one.
class Headwise {
public:
    Headwise(const std::vector<LayerShape>& layers, const StoreSettings& settings, int n_threads,
             const std::optional<std::string>& name, const SequencePool* pool)
        : kernels(kernels_named(name)),
          store(layers, settings, pool != nullptr ? pool->store : nullptr),
          attention(store, kernels, n_threads, pool != nullptr ? pool->workers : nullptr) {}

    // Attends to one micro-batch without a model: stages K and V for the first reader, attends,
    // commits after the last one.
    py::array_t<float> attend(int layer, int reader, const InputArray<float>& q,
                              const std::optional<InputArray<float>>& k,
                              const std::optional<InputArray<float>>& v, AttentionParams params,
                              const std::optional<InputArray<float>>& sinks,
                              const std::optional<InputArray<float>>& slopes, int position,
                              int n_echo) {
        const LayerShape& shape = shape_of(layer);
        const auto n_tokens = static_cast<int>(q.ndim() == 3 ? q.shape(0) : 0);
        const auto check = [&](const InputArray<float>& rows, int heads, int dim) {
            if (rows.ndim() != 3 || rows.shape(0) != n_tokens || rows.shape(1) != heads ||
                rows.shape(2) != dim)
                throw std::invalid_argument("q, k and v must be [n_tokens][heads][dim]");
        };
        check(q, shape.n_head, shape.k_dim);
        if (reader < 0 || reader >= shape.readers)
            throw std::invalid_argument("a reader that the layer does not have");
        if (reader > 0 && (layer != last_layer || reader != last_reader + 1))
            throw std::invalid_argument("readers of a layer attend one after the other");
        if (reader > 0 && n_tokens != attention.n_tokens())
            throw std::invalid_argument("readers of a layer attend to the same tokens");
        if (k.has_value() != (reader == 0))
            throw std::invalid_argument("k must be given for the first reader, and for no other");
        if (v.has_value() != (reader == 0 && !shape.latent))
            throw std::invalid_argument("v must be given with k unless it is a part of it");
        if (k) check(*k, shape.n_head_kv, shape.k_dim);
        if (v) check(*v, shape.n_head_kv, shape.v_dim);
        if (sinks && sinks->size() != shape.n_head)
            throw std::invalid_argument("sinks must be one for every query head");
        if (slopes && slopes->size() != shape.n_head)
            throw std::invalid_argument("slopes must be one for every query head");
        if (sinks) params.sinks = sinks->data();
        if (slopes) params.slopes = slopes->data();
        py::array_t<float> output({n_tokens, shape.n_head, shape.v_dim});
        const auto rows = [](const InputArray<float>& a) {
            return RowsView{reinterpret_cast<const std::byte*>(a.data()),
                            static_cast<std::size_t>(a.strides(0)),
                            static_cast<std::size_t>(a.strides(1))};
        };
        if (n_echo < 0 || n_echo > n_tokens)
            throw std::invalid_argument(
                "an echo of more tokens than there are, or of fewer than none");
        if (reader == 0) attention.begin(n_tokens - n_echo, position, position, n_echo);
        if (k) attention.stage_k(layer, rows(*k), 0, 1);
        if (v) attention.stage_v(layer, rows(*v), 0, 1);
        attention.attend(layer, reader, params, rows(q), output.mutable_data(), 0);
        attention.finish(0);
        last_layer = layer;
        last_reader = reader;
        return output;
    }

    const LayerShape& shape_of(int layer) const {
        if (layer < 0 || layer >= store.n_layers())
            throw std::invalid_argument("layer " + std::to_string(layer) + " of a store of " +
                                        std::to_string(store.n_layers()));
        return store.shape(layer);
    }

    void check_head(int layer, int head) const {
        const int n = shape_of(layer).n_head_kv;
        if (head < 0 || head >= n)
            throw std::invalid_argument("KV head " + std::to_string(head) + " of a layer of " +
                                        std::to_string(n));
    }

    // Budgets in entries; what threads work with shrinks with them.
    void set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                     const Protection& protection) {
        const std::size_t before = store.budget_bytes();
        store.set_budgets(budgets, pool_pages, protection);
        if (store.budget_bytes() < before) attention.release_scratch();
    }

    const KernelTable& kernels;
    HeadStore store;
    Attention attention;
    int last_layer = -1;  // that attend() was called for
    int last_reader = -1;
};

void bind_decisions(py::module_& m) {
    m.def("read_bandwidth", &read_bandwidth, py::arg("n_bytes"), py::arg("n_threads"),
          py::call_guard<py::gil_scoped_release>());
    m.def("available_kernels", [] {
        std::vector<std::string> names;
        for (const KernelTable* table : available_kernels()) names.emplace_back(table->name);
        return names;
    });
    m.def(
        "select_survivors",
        [](const InputArray<float>& scores, const InputArray<std::int32_t>& positions, int keep,
           int n_sinks, int recent_window, std::int32_t newest) {
            if (scores.size() != positions.size())
                throw std::invalid_argument("scores and positions must have one length");
            const auto n = static_cast<int>(scores.size());
            std::vector<std::uint8_t> kept(static_cast<std::size_t>(n));
            std::vector<float> scratch(static_cast<std::size_t>(n));
            select_survivors(scores.data(), positions.data(), n, keep, {n_sinks, recent_window},
                             newest, kept.data(), scratch.data());
            return to_array(kept);
        },
        py::arg("scores"), py::arg("positions"), py::arg("keep"), py::arg("n_sinks"),
        py::arg("recent_window"), py::arg("newest"));
    m.def("recency_score", &recency_score, py::arg("position"), py::arg("newest"),
          py::arg("variation"));
    m.def("entropy_weights", &entropy_weights, py::arg("entropies"), py::arg("mean"),
          py::arg("low"), py::arg("high"));
    m.def(
        "share_budget",
        [](int mean_entries, int max_entries, int floor_entries, std::vector<int> entries_per_page,
           std::vector<double> weights, std::vector<int> limits) {
            return share_budget({mean_entries, max_entries, floor_entries,
                                 std::move(entries_per_page), std::move(weights),
                                 std::move(limits)});
        },
        py::arg("mean_entries"), py::arg("max_entries"), py::arg("floor_entries"),
        py::arg("entries_per_page"), py::arg("weights"), py::arg("limits") = std::vector<int>{});
    m.def(
        "alibi_slopes",
        [](int n_head, float max_bias) { return to_array(alibi_slopes(n_head, max_bias)); },
        py::arg("n_head"), py::arg("max_bias"));
    m.def("most_entries", &most_entries, py::arg("layer"), py::arg("max_entries"));
    m.def(
        "losses_at",
        [](const InputArray<float>& scores, const std::vector<int>& knots) {
            std::vector<float> sorted(scores.data(), scores.data() + scores.size());
            std::vector<float> losses(knots.size());
            losses_at(sorted.data(), static_cast<int>(sorted.size()), knots, losses.data());
            return to_array(losses);
        },
        py::arg("scores"), py::arg("knots"));
    m.def(
        "curve_shares",
        [](std::vector<double> knots, std::vector<double> losses, double total) {
            return curve_shares({std::move(knots), std::move(losses)}, total);
        },
        py::arg("knots"), py::arg("losses"), py::arg("total"));
    m.def(
        "share_by_curves",
        [](int mean_entries, int max_entries, int floor_entries, std::vector<int> entries_per_page,
           std::vector<double> knots, std::vector<double> losses, std::vector<int> limits) {
            return share_by_curves({mean_entries,
                                    max_entries,
                                    floor_entries,
                                    std::move(entries_per_page),
                                    {},
                                    std::move(limits)},
                                   {std::move(knots), std::move(losses)});
        },
        py::arg("mean_entries"), py::arg("max_entries"), py::arg("floor_entries"),
        py::arg("entries_per_page"), py::arg("knots"), py::arg("losses"),
        py::arg("limits") = std::vector<int>{});
    m.def(
        "pages_for",
        [](int entries, int per_page) {
            if (entries > kMostPositions || per_page < 1)
                throw std::invalid_argument("pages hold 1 entry or more, of 2^30 at most");
            return pages_for(entries, per_page);
        },
        py::arg("entries"), py::arg("entries_per_page"));
    m.def(
        "page_geometry",
        [](const std::vector<LayerShape>& layers, const std::string& kv_type) {
            const std::vector<PageLayout> layouts = page_layouts(layers, kv_type_named(kv_type));
            std::vector<int> entries;
            for (const PageLayout& layout : layouts) entries.push_back(layout.entries);
            return py::make_tuple(pool_page_bytes(layers, kv_type_named(kv_type)), entries);
        },
        py::arg("layers"), py::arg("kv_type"));
    m.def(
        "plan_flat_eviction",
        [](const std::vector<std::int32_t>& positions, int keep, ScoreKind score, float variation,
           int n_sinks, int recent_window) {
            const FlatPlan plan =
                plan_flat_eviction(positions, keep, score, variation, {n_sinks, recent_window});
            return py::make_tuple(to_array(plan.kept), plan.removed);
        },
        py::arg("positions"), py::arg("keep"), py::arg("score"), py::arg("variation"),
        py::arg("n_sinks"), py::arg("recent_window"));
}

void bind_importance(py::module_& m) {
    py::enum_<ScoreKind>(m, "ScoreKind")
        .value("streaming", ScoreKind::streaming)
        .value("recency", ScoreKind::recency)
        .value("mass", ScoreKind::mass)
        .value("attention", ScoreKind::attention)
        .value("products", ScoreKind::products)
        .value("reconstruct", ScoreKind::reconstruct)
        .value("expected", ScoreKind::expected);
    py::class_<ImportanceSettings>(m, "ImportanceSettings")
        .def(py::init([](ScoreKind kind, float variation, float decay, int observation_window,
                         bool by_exposure, bool by_values, bool distinct, int future_positions) {
                 return ImportanceSettings{kind,        variation, decay,    observation_window,
                                           by_exposure, by_values, distinct, future_positions};
             }),
             py::arg("kind"), py::arg("variation") = 0.0f, py::arg("decay") = 0.0f,
             py::arg("observation_window") = 512, py::arg("by_exposure") = false,
             py::arg("by_values") = false, py::arg("distinct") = false,
             py::arg("future_positions") = 512)
        .def_readonly("decay", &ImportanceSettings::decay);
    m.def("exposure", &exposure, py::arg("age"), py::arg("settings"));
}

// What all hooks are for llama_context_params.
template <typename Hook>
void bind_callback(py::class_<Hook>& hook) {
    hook.def_property_readonly(
            "callback",
            [](const Hook&) { return reinterpret_cast<std::uintptr_t>(&Hook::on_node); })
        .def_property_readonly("user_data",
                               [](Hook& self) { return reinterpret_cast<std::uintptr_t>(&self); });
}

// And what those that change graphs are around every llama_decode.
template <typename Hook>
void bind_hook(py::class_<Hook>& hook) {
    bind_callback(hook);
    hook.def("begin_step", &Hook::begin_step).def("check_step", &Hook::check_step);
}

// And what those that change products of weights know of them.
template <typename Hook>
void bind_products(py::class_<Hook>& hook) {
    hook.def_property_readonly("products",
                               [](const Hook& self) { return self.products().computed_by(); })
        .def_property_readonly("products_scratch_bytes",
                               [](const Hook& self) { return self.products().scratch_bytes(); });
}

void bind_rope(py::module_& m) {
    py::class_<RopeParams>(m, "RopeParams")
        .def(py::init([](int n_dims, int offset, bool neox, int n_ctx_orig, float freq_base,
                         float freq_scale, float ext_factor, float beta_fast, float beta_slow,
                         std::vector<float> freq_factors) {
                 return RopeParams{
                     n_dims,     offset,     neox,      n_ctx_orig, freq_base,
                     freq_scale, ext_factor, beta_fast, beta_slow,  std::move(freq_factors)};
             }),
             py::arg("n_dims"), py::arg("offset") = 0, py::arg("neox") = false,
             py::arg("n_ctx_orig") = 0, py::arg("freq_base") = 10000.0f,
             py::arg("freq_scale") = 1.0f, py::arg("ext_factor") = 0.0f,
             py::arg("beta_fast") = 0.0f, py::arg("beta_slow") = 0.0f,
             py::arg("freq_factors") = std::vector<float>{})
        .def_readonly("n_dims", &RopeParams::n_dims)
        .def_readonly("offset", &RopeParams::offset)
        .def_readonly("neox", &RopeParams::neox)
        .def_readonly("n_ctx_orig", &RopeParams::n_ctx_orig)
        .def_readonly("freq_base", &RopeParams::freq_base)
        .def_readonly("freq_scale", &RopeParams::freq_scale)
        .def_readonly("ext_factor", &RopeParams::ext_factor)
        .def_readonly("beta_fast", &RopeParams::beta_fast)
        .def_readonly("beta_slow", &RopeParams::beta_slow)
        .def_readonly("freq_factors", &RopeParams::freq_factors)
        .def_property_readonly("frequencies", &rope_frequencies);
    py::class_<KShiftProbe> probe(m, "KShiftProbe");
    bind_callback(probe);
    probe.def(py::init<>()).def_property_readonly("obstacle", &KShiftProbe::obstacle);
    py::class_<WindowProbe> windows(m, "WindowProbe");
    bind_callback(windows);
    windows.def(py::init<>())
        .def_property_readonly("visible", &WindowProbe::visible)
        .def("clear", &WindowProbe::clear);
    m.def("rope_position", &rope_position, py::arg("position"), py::arg("n_sinks"),
          py::arg("shift"));
}

void bind_graph(py::module_& m) {
    py::class_<LayerShape>(m, "LayerShape")
        .def(py::init([](int n_head, int n_head_kv, int k_dim, int v_dim, int window, bool chunked,
                         bool latent, int readers) {
                 return LayerShape{n_head, n_head_kv, k_dim,  v_dim,
                                   window, chunked,   latent, readers};
             }),
             py::arg("n_head"), py::arg("n_head_kv"), py::arg("k_dim"), py::arg("v_dim"),
             py::arg("window") = 0, py::arg("chunked") = false, py::arg("latent") = false,
             py::arg("readers") = 1)
        .def_readonly("n_head", &LayerShape::n_head)
        .def_readonly("n_head_kv", &LayerShape::n_head_kv)
        .def_readonly("k_dim", &LayerShape::k_dim)
        .def_readonly("v_dim", &LayerShape::v_dim)
        .def_readonly("window", &LayerShape::window)
        .def_readonly("chunked", &LayerShape::chunked)
        .def_readonly("latent", &LayerShape::latent)
        .def_readonly("readers", &LayerShape::readers)
        .def_property_readonly("entry_values", &LayerShape::entry_values)
        .def(
            "with_window",
            [](LayerShape shape, int window, bool chunked) {
                shape.window = window;
                shape.chunked = chunked;
                return shape;
            },
            py::arg("window"), py::arg("chunked"));
    py::class_<AttentionNode>(m, "AttentionNode")
        .def_readonly("cache_layer", &AttentionNode::cache_layer)
        .def_readonly("shape", &AttentionNode::shape)
        .def_readonly("scale", &AttentionNode::scale)
        .def_readonly("softcap", &AttentionNode::softcap)
        .def_readonly("has_sinks", &AttentionNode::has_sinks)
        .def_readonly("rope", &AttentionNode::rope);
    py::class_<GateHook> gate_hook(m, "GateHook");
    gate_hook.def(py::init<int>(), py::arg("n_layers"));
    bind_hook(gate_hook);
    m.def("product_kernels", [] {
        std::vector<std::string> names;
        for (const ProductTable* table : available_products()) names.emplace_back(table->name);
        return names;
    });
    py::class_<WeightHook> weight_hook(m, "WeightHook");
    weight_hook.def(py::init<int, int>(), py::arg("relu2_layers"), py::arg("n_threads"));
    bind_hook(weight_hook);
    bind_products(weight_hook);
    py::class_<GraphHook> graph_hook(m, "GraphHook");
    bind_hook(graph_hook);
    bind_products(graph_hook);
    graph_hook
        .def(py::init<int, int, bool>(), py::arg("relu2_layers"), py::arg("n_threads"),
             py::arg("in_company") = false)
        .def_property_readonly("nodes", &GraphHook::nodes)
        .def_property_readonly("refusal", &GraphHook::refusal)
        .def_property_readonly("rope_obstacle", &GraphHook::rope_obstacle)
        .def_property_readonly("rope_limit", &GraphHook::rope_limit)
        .def(
            "serve", [](GraphHook& self, AttentionBatch& batch) { self.serve(batch); },
            py::arg("batch"), py::keep_alive<1, 2>());
}

// What calibration looks at: attention rows of the last micro-batch, and entries.
void bind_observation(py::class_<Headwise>& store) {
    store
        .def(
            "row_entropies",
            [](const Headwise& self, int layer) {
                const LayerShape& shape = self.shape_of(layer);
                const std::vector<float> rows = self.attention.row_entropies(layer);
                if (rows.empty()) throw std::invalid_argument("entropies were not tracked");
                return to_rows(rows, {self.attention.n_text(), shape.n_head});
            },
            py::arg("layer"))
        .def(
            "capture_queries",
            [](Headwise& self, bool on) { self.attention.set_query_capture(on); }, py::arg("on"))
        .def(
            "queries",
            [](const Headwise& self, int layer) {
                const LayerShape& shape = self.shape_of(layer);
                const Attention::Capture& capture = self.attention.capture(layer);
                const int n_tokens = self.attention.n_tokens();
                const auto size = static_cast<std::size_t>(n_tokens * shape.n_head * shape.k_dim);
                if (capture.queries.size() != size)
                    throw std::invalid_argument("queries were not captured");
                return py::make_tuple(
                    to_rows(capture.queries, {n_tokens, shape.n_head, shape.k_dim}),
                    to_array(capture.sinks), capture.softcap, shape.window, shape.chunked,
                    to_array(capture.slopes));
            },
            py::arg("layer"))
        .def(
            "rows",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                const StoredRows rows = self.store.rows(layer, head);
                const auto n = static_cast<py::ssize_t>(rows.positions.size());
                const LayerShape& shape = self.store.shape(layer);
                return py::make_tuple(to_array(rows.positions), to_array(rows.importance),
                                      to_rows(rows.k, {n, shape.k_dim}),
                                      to_rows(rows.v, {n, shape.v_dim}));
            },
            py::arg("layer"), py::arg("kv_head"));
}

// What forks and checkpoints share with a store.
void bind_sharing(py::module_& m, py::class_<Headwise>& store) {
    py::class_<Checkpoint>(m, "Checkpoint")
        .def("drop", &Checkpoint::drop)
        .def("copy", &Checkpoint::copy)
        .def_property_readonly("is_dropped", &Checkpoint::is_dropped)
        .def_property_readonly("pages", &Checkpoint::pages)
        .def_property_readonly("own_pages", &Checkpoint::own_pages)
        .def_property_readonly("copied_bytes", &Checkpoint::copied_bytes)
        .def_property_readonly("entries", &Checkpoint::entries)
        .def_property_readonly("evicted", &Checkpoint::evicted);
    store.def("checkpoint", [](Headwise& self) { return self.store.checkpoint(); })
        .def(
            "go_on_from",
            [](Headwise& self, Checkpoint& from, bool ends) {
                const py::gil_scoped_release release;
                return self.store.go_on_from(from, ends);
            },
            py::arg("checkpoint"), py::arg("ends"))
        .def(
            "checkpoint_count",
            [](const Headwise& self, const Checkpoint& from, int layer, int head) {
                self.check_head(layer, head);
                return self.store.count(from, layer, head);
            },
            py::arg("checkpoint"), py::arg("layer"), py::arg("kv_head"))
        .def(
            "save_checkpoint_head",
            [](const Headwise& self, const Checkpoint& from, int layer, int head) {
                self.check_head(layer, head);
                py::bytes state(nullptr, self.store.state_bytes(from, layer, head));
                self.store.save_head(from, layer, head,
                                     reinterpret_cast<std::byte*>(PyBytes_AS_STRING(state.ptr())));
                return state;
            },
            py::arg("checkpoint"), py::arg("layer"), py::arg("kv_head"))
        .def(
            "checkpoint_state_bytes",
            [](const Headwise& self, const Checkpoint& from, int layer, int head) {
                self.check_head(layer, head);
                return self.store.state_bytes(from, layer, head);
            },
            py::arg("checkpoint"), py::arg("layer"), py::arg("kv_head"))
        .def(
            "on_full",
            [](Headwise& self, std::function<bool()> drop) {
                self.store.pool().on_full(std::move(drop));
            },
            py::arg("drop"));
}

// What session files hold of a store.
void bind_state(py::class_<Headwise>& store) {
    const auto data = [](const py::bytearray& state) {
        return reinterpret_cast<std::byte*>(PyByteArray_AS_STRING(state.ptr()));
    };
    store
        .def(
            "state_bytes",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return self.store.state_bytes(layer, head);
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "save_head",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                py::bytes state(nullptr, self.store.state_bytes(layer, head));
                self.store.save_head(layer, head,
                                     reinterpret_cast<std::byte*>(PyBytes_AS_STRING(state.ptr())));
                return state;
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "state_problem",
            [data](const Headwise& self, int layer, int count, const py::bytearray& state,
                   int end) {
                self.shape_of(layer);
                return self.store.state_problem(layer, count, data(state), state.size(), end);
            },
            py::arg("layer"), py::arg("count"), py::arg("state"), py::arg("end"))
        .def(
            "begin_load",
            [data](Headwise& self, const std::vector<int>& counts,
                   const std::vector<py::bytearray>& states, const std::vector<int>& budgets) {
                std::vector<const std::byte*> starts;
                for (const py::bytearray& state : states) starts.push_back(data(state));
                self.store.begin_load(counts, starts, budgets);
            },
            py::arg("counts"), py::arg("states"), py::arg("budgets"))
        .def(
            "set_evicted",
            [](Headwise& self, std::size_t evicted) { self.store.set_evicted(evicted); },
            py::arg("evicted"))
        .def(
            "load_head",
            [data](Headwise& self, int layer, int head, int count, const py::bytearray& state) {
                self.check_head(layer, head);
                self.store.load_head(layer, head, count, data(state));
            },
            py::arg("layer"), py::arg("kv_head"), py::arg("count"), py::arg("state"));
}

ColdType cold_type_named(const std::string& name) {
    if (name == "as stored") return ColdType::as_stored;
    if (name == "q8_0") return ColdType::q8_0;
    if (name == "q4_0") return ColdType::q4_0;
    throw std::invalid_argument("cold storage holds entries as stored, or in q8_0 or q4_0");
}

void bind_freeze_settings(py::module_& m) {
    m.def(
        "cold_page_bytes",
        [](const std::vector<LayerShape>& layers, const std::string& kv_type,
           const std::string& cold_type) {
            const std::vector<PageLayout> layouts = page_layouts(layers, kv_type_named(kv_type));
            std::size_t bytes = 0;
            for (std::size_t i = 0; i < layers.size(); ++i)
                if (layers[i].window == 0)
                    bytes =
                        std::max(bytes, ColdCodec(cold_type_named(cold_type), layouts[i]).bytes());
            return bytes;
        },
        py::arg("layers"), py::arg("kv_type"), py::arg("cold_type"));
    py::register_exception<ColdStorageError>(m, "ColdStorageError", PyExc_OSError);
    py::class_<FreezeSchedule>(m, "FreezeSchedule")
        .def(py::init([](int window, float threshold, float rate, int history) {
                 return FreezeSchedule{window, threshold, rate, history};
             }),
             py::arg("window"), py::arg("threshold"), py::arg("rate"), py::arg("history"));
    py::class_<FreezeSettings>(m, "FreezeSettings")
        .def(py::init([](const std::string& kv_type, std::size_t limit_bytes, int recall_interval,
                         const std::optional<FreezeSchedule>& schedule, int descriptor,
                         const py::bytes& nonce) {
                 FreezeSettings settings{cold_type_named(kv_type), limit_bytes, recall_interval,
                                         schedule, descriptor};
                 const std::string bytes = nonce;
                 if (!bytes.empty() && bytes.size() != sizeof settings.nonce)
                     throw std::invalid_argument("a nonce has 16 bytes");
                 std::memcpy(settings.nonce.data(), bytes.data(), bytes.size());
                 return settings;
             }),
             py::arg("kv_type"), py::arg("limit_bytes"), py::arg("recall_interval"),
             py::arg("schedule") = py::none(), py::arg("descriptor") = -1,
             py::arg("nonce") = py::bytes());
}

void bind_freezing(py::class_<Headwise>& store) {
    store.def("recall_now", [](Headwise& self) { self.attention.recall_now(); })
        .def(
            "freeze_all", [](Headwise& self, int now) { self.store.freeze_all(now); },
            py::arg("now"))
        .def(
            "restore",
            [](Headwise& self, int now, int frozen_after, int due_after, bool forget) {
                return self.store.restore({frozen_after, due_after}, now, forget);
            },
            py::arg("now"), py::arg("frozen_after") = -1, py::arg("due_after") = -1,
            py::arg("forget") = false)
        .def("stop_freezing", [](Headwise& self) { self.store.stop_freezing(); })
        .def(
            "frozen_positions",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return to_array(self.store.frozen_positions(layer, head));
            },
            py::arg("layer"), py::arg("kv_head"))
        .def_property_readonly("frozen", [](const Headwise& s) { return s.store.frozen(); })
        .def_property_readonly("frozen_total",
                               [](const Headwise& s) { return s.store.frozen_total(); })
        .def_property_readonly("restored_total",
                               [](const Headwise& s) { return s.store.restored_total(); })
        .def_property_readonly("recalled_total",
                               [](const Headwise& s) { return s.store.recalled_total(); })
        .def_property_readonly("cold_seconds",
                               [](const Headwise& s) { return s.store.cold_seconds(); })
        .def_property_readonly("cold_bytes", [](const Headwise& s) { return s.store.cold_bytes(); })
        .def_property_readonly("sketch_bytes",
                               [](const Headwise& s) { return s.store.sketch_bytes(); })
        .def_property_readonly("cold_file_bytes",
                               [](const Headwise& s) { return s.store.cold_file_bytes(); })
        .def_property_readonly("cold_failure", [](const Headwise& s) -> std::optional<std::string> {
            const char* why = s.store.cold_failure();
            if (why == nullptr) return std::nullopt;
            return why;
        });
}

// What sequences share, and the micro-batch that holds tokens of several.
void bind_pool(py::module_& m) {
    py::class_<SequencePool>(m, "SequencePool")
        .def(py::init([](const std::vector<LayerShape>& layers, const std::string& kv_type,
                         int max_tokens, int n_sequences) {
                 return SequencePool{std::make_shared<StorePool>(layers, kv_type_named(kv_type),
                                                                 max_tokens, n_sequences)};
             }),
             py::arg("layers"), py::arg("kv_type"), py::arg("max_tokens"), py::arg("n_sequences"))
        .def(
            "set_pages", [](SequencePool& self, std::size_t n) { self.store->set_pages(n); },
            py::arg("pages"))
        .def(
            "on_full",
            [](SequencePool& self, std::function<bool()> drop) {
                self.store->on_full(std::move(drop));
            },
            py::arg("drop"))
        .def_property_readonly("shared_pages",
                               [](const SequencePool& s) { return s.store->shared_pages(); })
        .def_property_readonly(
            "budget_bytes", [](const SequencePool& s) { return s.store->pages().budget_bytes(); })
        .def_property_readonly("used_bytes",
                               [](const SequencePool& s) { return s.store->pages().used_bytes(); })
        .def_property_readonly("peak_bytes",
                               [](const SequencePool& s) { return s.store->pages().peak_bytes(); })
        .def_property_readonly(
            "mapped_bytes", [](const SequencePool& s) { return s.store->pages().mapped_bytes(); })
        .def_property_readonly("staging_bytes",
                               [](const SequencePool& s) { return s.store->staging().bytes(); })
        .def_property_readonly("scratch_bytes", [](const SequencePool& s) {
            return Attention::bytes_of_workers(*s.workers);
        });
    py::class_<AttentionBatch>(m, "AttentionBatch")
        .def(py::init<>())
        .def("clear", &AttentionBatch::clear)
        .def(
            "add",
            [](AttentionBatch& self, Headwise& store, int n_tokens, int position, int rope_position,
               int n_echo) {
                self.add(store.attention, n_tokens, position, rope_position, n_echo);
            },
            py::arg("store"), py::arg("n_tokens"), py::arg("position"), py::arg("rope_position"),
            py::arg("n_echo") = 0)
        .def_property_readonly("n_tokens", &AttentionBatch::n_tokens);
}

// A picture for those who watch: bytes of (KV heads of all layers, columns).
void bind_map(py::module_& m) {
    py::class_<CacheMap>(m, "CacheMap")
        .def(py::init<>())
        .def(
            "look",
            [](CacheMap& self, const Headwise& store, std::int32_t first, int per_column,
               int n_columns) {
                if (first < 0 || per_column < 1 || n_columns < 1)
                    throw std::invalid_argument("columns must be 1 or more, from 0 or later on");
                {
                    const py::gil_scoped_release release;
                    self.look(store.store, first, per_column, n_columns);
                }
                const auto rows = [n_columns](const std::vector<std::uint8_t>& shares) {
                    const auto n = static_cast<py::ssize_t>(shares.size()) / n_columns;
                    return py::array_t<std::uint8_t>({n, py::ssize_t{n_columns}}, shares.data());
                };
                return py::make_tuple(rows(self.held()), rows(self.frozen()),
                                      rows(self.restored()));
            },
            py::arg("store"), py::arg("first"), py::arg("per_column"), py::arg("n_columns"));
}

void bind_headwise(py::module_& m) {
    bind_freeze_settings(m);
    py::class_<Headwise> store(m, "HeadwiseStore");
    bind_observation(store);
    bind_state(store);
    bind_sharing(m, store);
    bind_freezing(store);
    store
        .def(py::init([](const std::vector<LayerShape>& layers, const std::string& kv_type,
                         const ImportanceSettings& importance, int n_sinks, int recent_window,
                         int max_tokens, int max_entries, int n_threads, bool own_windows,
                         bool shared_choice, const std::optional<std::string>& kernels,
                         std::vector<RopeParams> ropes,
                         const std::optional<FreezeSettings>& freezing, const SequencePool* pool) {
                 const StoreSettings settings{kv_type_named(kv_type),
                                              importance,
                                              {n_sinks, recent_window},
                                              own_windows,
                                              max_tokens,
                                              max_entries,
                                              std::move(ropes),
                                              freezing};
                 auto store =
                     std::make_unique<Headwise>(layers, settings, n_threads, kernels, pool);
                 store->attention.set_shared_choice(shared_choice);
                 return store;
             }),
             py::arg("layers"), py::arg("kv_type"), py::arg("importance"), py::arg("n_sinks"),
             py::arg("recent_window"), py::arg("max_tokens"), py::arg("max_entries"),
             py::arg("n_threads"), py::arg("own_windows") = false, py::arg("shared_choice") = false,
             py::arg("kernels") = py::none(), py::arg("ropes") = std::vector<RopeParams>{},
             py::arg("freezing") = py::none(), py::arg("pool") = py::none())
        .def("give_up_share",
             [](Headwise& self) {
                 self.store.give_up_share();
                 self.attention.release_scratch();
             })
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
        .def(
            "attend",
            [](Headwise& self, int layer, const InputArray<float>& q,
               const std::optional<InputArray<float>>& k, const std::optional<InputArray<float>>& v,
               float scale, float softcap, const std::optional<InputArray<float>>& sinks,
               int position, const std::optional<InputArray<float>>& slopes, int reader,
               int n_echo) {
                return self.attend(layer, reader, q, k, v, {scale, softcap}, sinks, slopes,
                                   position, n_echo);
            },
            py::arg("layer"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("scale"),
            py::arg("softcap") = 0.0f, py::arg("sinks") = py::none(), py::arg("position") = 0,
            py::arg("slopes") = py::none(), py::arg("reader") = 0, py::arg("n_echo") = 0)
        .def(
            "measure_losses",
            [](Headwise& self, const std::vector<int>& knots) { self.store.measure_losses(knots); },
            py::arg("knots"))
        .def("losses", [](const Headwise& self) { return to_array(self.store.losses()); })
        .def(
            "track_entropy",
            [](Headwise& self, bool on) {
                self.attention.set_entropy_tracking(on);
                self.attention.reset_entropy();
            },
            py::arg("on"))
        .def(
            "entropies",
            [](const Headwise& self, int layer) {
                self.shape_of(layer);
                std::vector<double> means = self.attention.entropy_sums(layer);
                const auto rows = static_cast<double>(self.attention.entropy_rows(layer));
                if (rows == 0.0) throw std::invalid_argument("nothing was attended to yet");
                for (double& mean : means) mean /= rows;
                return to_array(means);
            },
            py::arg("layer"))
        .def(
            "rebase",
            [](Headwise& self, const std::vector<RopeParams>& ropes, int n_sinks, int old_shift,
               int new_shift) {
                const py::gil_scoped_release release;
                rebase(self.store, self.kernels, ropes, n_sinks, old_shift, new_shift);
            },
            py::arg("ropes"), py::arg("n_sinks"), py::arg("old_shift"), py::arg("new_shift"))
        .def(
            "truncate", [](Headwise& self, int position) { self.store.truncate(position); },
            py::arg("position"))
        .def(
            "positions",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return to_array(self.store.positions(layer, head));
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "importance",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return to_array(self.store.importance(layer, head));
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "budget",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return self.store.budget(layer, head);
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "count",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return self.store.count(layer, head);
            },
            py::arg("layer"), py::arg("kv_head"))
        .def_property_readonly("entries", [](const Headwise& s) { return s.store.entries(); })
        .def_property_readonly("evicted", [](const Headwise& s) { return s.store.evicted(); })
        .def_property_readonly("windows_whole_from",
                               [](const Headwise& s) { return s.store.windows_whole_from(); })
        .def_property_readonly("eviction_seconds",
                               [](const Headwise& s) { return s.store.eviction_seconds(); })
        .def_property_readonly("budget_bytes",
                               [](const Headwise& s) { return s.store.budget_bytes(); })
        .def_property_readonly("used_bytes", [](const Headwise& s) { return s.store.used_bytes(); })
        .def_property_readonly("peak_bytes", [](const Headwise& s) { return s.store.peak_bytes(); })
        .def_property_readonly("mapped_bytes",
                               [](const Headwise& s) { return s.store.mapped_bytes(); })
        .def_property_readonly("staging_bytes",
                               [](const Headwise& s) { return s.store.staging_bytes(); })
        .def_property_readonly("scratch_bytes", [](const Headwise& s) {
            return s.store.workspace_bytes() + s.attention.scratch_bytes();
        });
}

void bind_flat(py::module_& m) {
    const auto context = [](std::uintptr_t address) {
        return reinterpret_cast<llama_context*>(address);
    };
    py::class_<FlatStore>(m, "FlatStore")
        .def(py::init([context](std::uintptr_t address, int budget, ScoreKind score,
                                float variation, int n_sinks, int recent_window, int rope_sinks) {
                 return std::make_unique<FlatStore>(context(address), budget, score, variation,
                                                    Protection{n_sinks, recent_window}, rope_sinks);
             }),
             py::arg("context"), py::arg("budget"), py::arg("score"), py::arg("variation"),
             py::arg("n_sinks"), py::arg("recent_window"), py::arg("rope_sinks"))
        .def("make_room", &FlatStore::make_room, py::arg("n_tokens"),
             py::call_guard<py::gil_scoped_release>())
        .def("settle", &FlatStore::settle, py::arg("position"), py::arg("n_tokens"),
             py::call_guard<py::gil_scoped_release>())
        .def(
            "set_budget",
            [](FlatStore& self, int budget, int n_sinks, int recent_window) {
                self.set_budget(budget, {n_sinks, recent_window});
            },
            py::arg("budget"), py::arg("n_sinks"), py::arg("recent_window"))
        .def("truncate", &FlatStore::truncate, py::arg("position"))
        .def("save_state",
             [](FlatStore& self) {
                 const std::vector<std::uint8_t> state = self.save_state();
                 return py::bytes(reinterpret_cast<const char*>(state.data()), state.size());
             })
        .def(
            "load_state",
            [](FlatStore& self, std::vector<std::int32_t> positions, const py::bytearray& state,
               std::size_t evicted, int shift) {
                const auto* data =
                    reinterpret_cast<const std::uint8_t*>(PyByteArray_AS_STRING(state.ptr()));
                self.load_state(std::move(positions), data, state.size(), evicted, shift);
            },
            py::arg("positions"), py::arg("state"), py::arg("evicted"), py::arg("shift"))
        .def("rebase", &FlatStore::rebase, py::arg("shift"))
        .def_property("shift", &FlatStore::shift, &FlatStore::set_shift)
        .def(
            "move_to",
            [context](FlatStore& self, std::uintptr_t address) { self.move_to(context(address)); },
            py::arg("context"))
        .def_property_readonly("positions",
                               [](const FlatStore& s) { return to_array(s.positions()); })
        .def_property_readonly("entries", [](const FlatStore& s) { return s.positions().size(); })
        .def_property_readonly("budget", &FlatStore::budget)
        .def_property_readonly("peak", &FlatStore::peak)
        .def_property_readonly("evicted", &FlatStore::evicted)
        .def_property_readonly("compactions", &FlatStore::compactions)
        .def_property_readonly("largest_copy", &FlatStore::largest_copy)
        .def_property_readonly("eviction_seconds", &FlatStore::eviction_seconds);
}

void bind_built_for(py::module_& m) {
    m.attr("SEQUENCE_STATE_VERSION") = sequence_state_version();
    m.def("ggml_version", &ggml_version);
    m.def("ggml_commit", &ggml_commit);
    m.def("differences", &differences);
    m.def("struct_layouts", [] {
        std::vector<std::tuple<std::string, std::size_t, std::string, std::size_t>> layouts;
        for (const StructLayout& s : struct_layouts())
            layouts.emplace_back(s.name, s.size, s.field, s.offset);
        return layouts;
    });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
    m.doc() = "Stores, attention and budgets of entropykv";
    bind_built_for(m);
    bind_importance(m);
    bind_rope(m);
    bind_graph(m);
    bind_decisions(m);
    bind_pool(m);
    bind_headwise(m);
    bind_map(m);
    bind_flat(m);
}
