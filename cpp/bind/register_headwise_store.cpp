// Registers the headwise store, whose KV heads keep entries of their own, with the attention over
// them.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "attention/headwise_store.hpp"
#include "bind/arrays.hpp"
#include "page/page_codec.hpp"
#include "store/cache_map.hpp"

namespace entropykv::bind {

namespace {

// Converts an array of [n_tokens][heads][dim].
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

// Returns one value for every query head, or null without an array.
const float* per_head(const std::optional<InputArray<float>>& values, int n_head,
                      const char* problem) {
    if (!values) return nullptr;
    if (values->size() != n_head) throw std::invalid_argument(problem);
    return values->data();
}

py::array_t<float> attend_alone(HeadwiseStore& self, int layer, const InputArray<float>& q,
                                const std::optional<InputArray<float>>& k,
                                const std::optional<InputArray<float>>& v, float scale,
                                float softcap, const std::optional<InputArray<float>>& sinks,
                                int position, const std::optional<InputArray<float>>& slopes,
                                int reader, int n_echo, int n_drafts) {
    const LayerShape& shape = self.shape_of(layer);
    const HeadwiseStore::MicroBatch batch{rows_of(q), rows_of(k), rows_of(v),
                                          position,   n_echo,     n_drafts};
    const AttentionParams params{
        scale, softcap, per_head(sinks, shape.n_head, "sinks must be one for every query head"),
        per_head(slopes, shape.n_head, "slopes must be one for every query head")};
    py::array_t<float> output({batch.q.n_tokens, shape.n_head, shape.v_dim});
    self.attend_alone(layer, reader, batch, params, output.mutable_data());
    return output;
}

// Converts one array of [KV head][centre, unit][k_dim] for every layer, or an empty one.
std::vector<std::vector<KeyCentre>> centres_of(const std::vector<LayerShape>& layers,
                                               const std::vector<InputArray<float>>& arrays) {
    if (!arrays.empty() && arrays.size() != layers.size())
        throw std::invalid_argument("key centres must be one array for every layer");
    std::vector<std::vector<KeyCentre>> centres(arrays.size());
    for (std::size_t layer = 0; layer < arrays.size(); ++layer) {
        const InputArray<float>& array = arrays[layer];
        if (array.size() == 0) continue;
        if (array.ndim() != 3 || array.shape(1) != 2)
            throw std::invalid_argument("key centres must be [n_head_kv][2][k_dim]");
        for (py::ssize_t head = 0; head < array.shape(0); ++head) {
            const float* centre = array.data(head, 0, 0);
            const float* unit = centre + array.shape(2);
            centres[layer].push_back({{centre, unit}, {unit, unit + array.shape(2)}});
        }
    }
    return centres;
}

std::unique_ptr<HeadwiseStore> make_store(
    const std::vector<LayerShape>& layers, const std::string& kv_type,
    const ImportanceSettings& importance, int n_sinks, int recent_window, int max_tokens,
    int max_entries, int n_threads, bool own_windows, bool counts_dropped, bool shared_choice,
    const std::optional<std::string>& kernels, std::vector<RopeParams> ropes,
    const std::vector<InputArray<float>>& key_centres,
    const std::optional<FreezeSettings>& freezing, const SequencePool* pool) {
    const StoreSettings settings{kv_type_named(kv_type),
                                 importance,
                                 {n_sinks, recent_window},
                                 own_windows,
                                 counts_dropped,
                                 max_tokens,
                                 max_entries,
                                 std::move(ropes),
                                 centres_of(layers, key_centres),
                                 freezing};
    auto store = std::make_unique<HeadwiseStore>(layers, settings, n_threads, kernels, pool);
    store->attention.set_shared_choice(shared_choice);
    return store;
}

void register_figures(py::class_<HeadwiseStore>& store) {
    store
        .def_property(
            "evicted", [](const HeadwiseStore& s) { return s.store.evicted(); },
            [](HeadwiseStore& s, std::size_t n) { s.store.components().common.evicted = n; })
        .def_property_readonly("eviction_seconds", &HeadwiseStore::eviction_seconds)
        .def_property_readonly("scratch_bytes", &HeadwiseStore::scratch_bytes);
    Figures(store, [](const HeadwiseStore& s) -> const HeadStore& { return s.store; })
        .add("entries", &HeadStore::entries)
        .add("windows_whole_from", &HeadStore::windows_whole_from);
    Figures(store, [](const HeadwiseStore& s) -> const PageShare& { return s.store.share(); })
        .add("budget_bytes", &PageShare::budget_bytes)
        .add("used_bytes", &PageShare::used_bytes)
        .add("peak_bytes", &PageShare::peak_bytes)
        .add("mapped_bytes", [](const PageShare& s) { return s.pool().pages().mapped_bytes(); })
        .add("staging_bytes", [](const PageShare& s) { return s.pool().staging().bytes(); });
}

// Returns the scores of entries, given their importance.
std::vector<float> scores_of(const HeadStore& store, std::vector<float> importance) {
    for (float& value : importance) value = store.settings().importance.score_of(value);
    return importance;
}

void register_heads(py::class_<HeadwiseStore>& store) {
    def_of_head(store, "positions", [](const HeadStore& self, int layer, int head) {
        return to_array(positions_of(self.head(layer, head)));
    });
    def_of_head(store, "importance", [](const HeadStore& self, int layer, int head) {
        return to_array(scores_of(self, importance_of(self.head(layer, head))));
    });
    def_of_head(store, "budget", [](const HeadStore& self, int layer, int head) {
        return self.head(layer, head).budget();
    });
    def_of_head(store, "count", [](const HeadStore& self, int layer, int head) {
        return self.head(layer, head).count();
    });
    def_of_head(store, "frozen_positions", [](const HeadStore& self, int layer, int head) {
        return to_array(frozen_positions(self.head(layer, head)));
    });
    def_of_head(store, "rows", [](const HeadStore& self, int layer, int head) {
        const StoredRows rows = rows_of(self.head(layer, head));
        const auto n = static_cast<py::ssize_t>(rows.positions.size());
        const LayerShape& shape = self.shape(layer);
        return py::make_tuple(to_array(rows.positions), to_array(scores_of(self, rows.importance)),
                              to_rows(rows.k, {n, shape.k_dim}), to_rows(rows.v, {n, shape.v_dim}));
    });
}

void register_losses(py::class_<HeadwiseStore>& store) {
    store
        .def(
            "measure_losses",
            [](HeadwiseStore& self, const std::vector<int>& knots) {
                self.store.components().measure_losses(knots);
            },
            py::arg("knots"))
        .def(
            "losses",
            [](const HeadwiseStore& self, bool of_held) {
                return to_array(self.store.components().last_losses(of_held));
            },
            py::arg("of_held") = false);
}

void register_freezing(py::class_<HeadwiseStore>& store) {
    store
        .def_property(
            "recalls_now", [](HeadwiseStore& self) { return self.attention.recalls_now(); },
            [](HeadwiseStore& self, bool on) { self.attention.recalls_now() = on; })
        .def(
            "freeze_all",
            [](HeadwiseStore& self, int now) {
                FrozenHeads(self.store.components()).freeze_all(now);
            },
            py::arg("now"))
        .def(
            "restore",
            [](HeadwiseStore& self, int now, int frozen_after, int due_after, bool forget) {
                return FrozenHeads(self.store.components())
                    .restore({frozen_after, due_after}, now, forget);
            },
            py::arg("now"), py::arg("frozen_after") = -1, py::arg("due_after") = -1,
            py::arg("forget") = false)
        .def("stop_freezing",
             [](HeadwiseStore& self) { FrozenHeads(self.store.components()).stop(); })
        .def_property_readonly("cold_failure",
                               [](const HeadwiseStore& s) -> std::optional<std::string> {
                                   const char* why = s.store.frozen().failure();
                                   if (why == nullptr) return std::nullopt;
                                   return why;
                               });
    Figures(store, [](const HeadwiseStore& s) { return s.store.frozen(); })
        .add("frozen", &FrozenFigures::now)
        .add("frozen_total", &FrozenFigures::frozen)
        .add("restored_total", &FrozenFigures::restored)
        .add("recalled_total", &FrozenFigures::recalled)
        .add("cold_seconds", &FrozenFigures::seconds)
        .add("cold_bytes", &FrozenFigures::bytes)
        .add("sketch_bytes", &FrozenFigures::sketch_bytes)
        .add("cold_overhead_bytes", &FrozenFigures::overhead_bytes)
        .add("cold_file_bytes", &FrozenFigures::file_bytes);
}

void register_observation(py::class_<HeadwiseStore>& store) {
    store
        .def(
            "row_entropies",
            [](const HeadwiseStore& self, int layer) {
                const LayerShape& shape = self.shape_of(layer);
                const std::vector<float> rows = self.attention.entropies().last_rows(layer);
                if (rows.empty()) throw std::invalid_argument("entropies were not tracked");
                return to_rows(rows, {self.attention.step().n_text, shape.n_head});
            },
            py::arg("layer"))
        .def(
            "capture_queries",
            [](HeadwiseStore& self, bool on) { self.attention.queries().enable(on); },
            py::arg("on"))
        .def(
            "queries",
            [](const HeadwiseStore& self, int layer) {
                const LayerShape& shape = self.shape_of(layer);
                const QueryCapture::Rows& capture = self.attention.queries().of(layer);
                const int n_tokens = self.attention.step().n_tokens;
                const auto size = static_cast<std::size_t>(n_tokens * shape.n_head * shape.k_dim);
                if (capture.queries.size() != size)
                    throw std::invalid_argument("queries were not captured");
                return py::make_tuple(
                    to_rows(capture.queries, {n_tokens, shape.n_head, shape.k_dim}),
                    to_array(capture.sinks), capture.softcap, shape.window, shape.chunked,
                    to_array(capture.slopes));
            },
            py::arg("layer"));
}

int n_features(const HeadwiseStore& self, int layer) {
    self.shape_of(layer);
    return self.store.components().features_of(static_cast<std::size_t>(layer)).n;
}

void set_predictor(HeadwiseStore& self, int layer, const InputArray<float>& weights) {
    const LayerShape& shape = self.shape_of(layer);
    const bool fits = weights.ndim() == 2 && weights.shape(0) == shape.n_head_kv &&
                      weights.shape(1) == n_features(self, layer);
    if (!fits && weights.size() > 0)
        throw std::invalid_argument("a predictor's weights must be [n_head_kv][n_features]");
    self.store.components().set_predictor(
        static_cast<std::size_t>(layer),
        std::vector<float>(weights.data(), weights.data() + weights.size()));
}

// Returns the predicted shares of attention of a head's entries, in the order of positions.
py::array_t<float> predicted_shares(const HeadwiseStore& self, int layer, int head) {
    self.check_head(layer, head);
    if (!self.store.settings().importance.predicts())
        throw std::invalid_argument("this store predicts no shares: use the measure predicted");
    std::vector<float> shares = importance_of(self.store.head(layer, head));
    for (float& share : shares) share = PackedImportance(share).share();
    return to_array(shares);
}

py::tuple lessons(const HeadwiseStore& self, int layer) {
    const LayerShape& shape = self.shape_of(layer);
    const LessonSums* lessons = self.store.components().lessons();
    if (lessons == nullptr) throw std::invalid_argument("lessons were not collected");
    const auto number = static_cast<std::size_t>(layer);
    const py::ssize_t n = n_features(self, layer) + 1;
    return py::make_tuple(lessons->count(number),
                          py::array_t<double>(std::vector<py::ssize_t>{shape.n_head_kv, n, n},
                                              lessons->sums(number).data()));
}

void register_prediction(py::class_<HeadwiseStore>& store) {
    store.def("predictor_features", &n_features, py::arg("layer"))
        .def("set_predictor", &set_predictor, py::arg("layer"), py::arg("weights"))
        .def_property_readonly(
            "is_predicted",
            [](const HeadwiseStore& self) { return self.store.components().has_predictor(); })
        .def(
            "predict_stored",
            [](HeadwiseStore& self, std::int32_t n_positions, std::int32_t shift) {
                self.store.components().predict_stored(n_positions, shift);
            },
            py::arg("n_positions"), py::arg("shift"))
        .def("predicted_shares", &predicted_shares, py::arg("layer"), py::arg("head"))
        .def(
            "collect_lessons",
            [](HeadwiseStore& self, bool on) { self.store.components().collect_lessons(on); },
            py::arg("on"))
        .def(
            "teach_stored",
            [](HeadwiseStore& self, std::int32_t begin, std::int32_t end, std::int32_t shift) {
                self.store.components().teach_stored(begin, end, shift);
            },
            py::arg("begin"), py::arg("end"), py::arg("shift"))
        .def("lessons", &lessons, py::arg("layer"))
        .def("clear_lessons", [](HeadwiseStore& self) { self.store.components().clear_lessons(); });
}

void register_attention_batch(py::module_& m) {
    py::class_<AttentionBatch>(m, "AttentionBatch")
        .def(py::init<>())
        .def("clear", &AttentionBatch::clear)
        .def(
            "add",
            [](AttentionBatch& self, HeadwiseStore& store, int n_tokens, int position,
               int rope_position, int n_echo, bool see_all, int n_drafts, bool recalls) {
                self.add(store.attention,
                         {n_tokens, position, rope_position, n_echo, n_drafts, see_all, recalls});
            },
            py::arg("store"), py::arg("n_tokens"), py::arg("position"), py::arg("rope_position"),
            py::arg("n_echo") = 0, py::arg("see_all") = false, py::arg("n_drafts") = 0,
            py::arg("recalls") = true)
        .def(
            "most_drafts",
            [](const AttentionBatch& self, const HeadwiseStore& store, int wanted) {
                return self.most_drafts(store.attention, wanted);
            },
            py::arg("store"), py::arg("wanted"))
        .def_property_readonly("n_tokens", &AttentionBatch::n_tokens);
}

// Registers the map of held and frozen positions; arrays are bytes, (KV heads of all layers,
// columns).
void register_cache_map(py::module_& m) {
    py::class_<CacheMap>(m, "CacheMap")
        .def(py::init<>())
        .def(
            "count",
            [](CacheMap& self, const HeadwiseStore& store, std::int32_t first, int per_column,
               int n_columns) {
                if (first < 0 || per_column < 1 || n_columns < 1)
                    throw std::invalid_argument("columns must be 1 or more, from 0 or later on");
                {
                    const py::gil_scoped_release release;
                    self.count(store.store, first, per_column, n_columns);
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

}  // namespace

void register_headwise_store(py::module_& m) {
    py::class_<HeadwiseStore> store(m, "HeadwiseStore");
    register_observation(store);
    register_headwise_state(store);
    register_freezing(store);
    register_prediction(store);
    register_figures(store);
    store
        .def(py::init(&make_store), py::arg("layers"), py::arg("kv_type"), py::arg("importance"),
             py::arg("n_sinks"), py::arg("recent_window"), py::arg("max_tokens"),
             py::arg("max_entries"), py::arg("n_threads"), py::arg("own_windows") = false,
             py::arg("counts_dropped") = false, py::arg("shared_choice") = false,
             py::arg("kernels") = py::none(), py::arg("ropes") = std::vector<RopeParams>{},
             py::arg("key_centres") = std::vector<InputArray<float>>{},
             py::arg("freezing") = py::none(), py::arg("pool") = py::none())
        .def("give_up_share", &HeadwiseStore::give_up_share)
        .def(
            "set_budgets",
            [](HeadwiseStore& self, const std::vector<int>& budgets, std::size_t pool_pages,
               int n_sinks, int recent_window) {
                const py::gil_scoped_release release;
                self.set_budgets(budgets, pool_pages, {n_sinks, recent_window});
            },
            py::arg("budgets"), py::arg("pool_pages"), py::arg("n_sinks"), py::arg("recent_window"))
        .def(
            "begin",
            [](HeadwiseStore& self, int n_tokens, int position, int rope_position, int n_echo) {
                self.attention.begin({n_tokens, position, rope_position, n_echo});
            },
            py::arg("n_tokens"), py::arg("position"), py::arg("rope_position"),
            py::arg("n_echo") = 0)
        .def("attend_alone", &attend_alone, py::arg("layer"), py::arg("q"), py::arg("k"),
             py::arg("v"), py::arg("scale"), py::arg("softcap") = 0.0f,
             py::arg("sinks") = py::none(), py::arg("position") = 0, py::arg("slopes") = py::none(),
             py::arg("reader") = 0, py::arg("n_echo") = 0, py::arg("n_drafts") = 0)
        .def(
            "most_drafts",
            [](const HeadwiseStore& self, int wanted) {
                return self.attention.most_drafts(wanted);
            },
            py::arg("wanted"))
        .def(
            "settle_drafts",
            [](HeadwiseStore& self, int n_accepted) { self.attention.settle_drafts(n_accepted); },
            py::arg("n_accepted"))
        .def("track_entropy", &HeadwiseStore::track_entropy, py::arg("on"))
        .def(
            "entropies",
            [](const HeadwiseStore& self, int layer) {
                return to_array(self.mean_entropies(layer));
            },
            py::arg("layer"))
        .def(
            "rebase",
            [](HeadwiseStore& self, const std::vector<RopeParams>& ropes, int n_sinks,
               int old_shift, int new_shift) {
                const py::gil_scoped_release release;
                self.rebase(ropes, n_sinks, old_shift, new_shift);
            },
            py::arg("ropes"), py::arg("n_sinks"), py::arg("old_shift"), py::arg("new_shift"))
        .def(
            "truncate", [](HeadwiseStore& self, int position) { self.store.truncate(position); },
            py::arg("position"));
    register_heads(store);
    register_losses(store);
    register_attention_batch(m);
    register_cache_map(m);
}

}  // namespace entropykv::bind
