// Registers what a store is described by: the shapes of layers, how keys are rotated, how entries
// are ranked, and what is frozen.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include <cstring>

#include "bind/arrays.hpp"
#include "cold/cold_storage.hpp"
#include "decide/importance.hpp"
#include "decide/key_centre.hpp"
#include "decide/rope_params.hpp"
#include "page/page_codec.hpp"
#include "store/head_store.hpp"

namespace entropykv::bind {
namespace {

void register_importance(py::module_& m) {
    py::enum_<ScoreKind> kinds(m, "ScoreKind");
    py::class_<Measure>(m, "Measure")
        .def_readonly("kind", &Measure::kind)
        .def_readonly("name", &Measure::name)
        .def_readonly("summary", &Measure::summary)
        .def_property_readonly(
            "by_position", [](const Measure& self) { return self.evidence == Evidence::position; })
        .def_property_readonly(
            "adds_up", [](const Measure& self) { return self.observes() && !self.by_largest(); })
        .def_readonly("of_echoes", &Measure::of_echoes)
        .def_property_readonly(
            "predicts", [](const Measure& self) { return self.evidence == Evidence::prediction; })
        .def_readonly("threshold", &Measure::threshold);
    for (const Measure& measure : kMeasures) kinds.value(measure.name, measure.kind);
    m.def("measures", [] { return std::vector<Measure>(kMeasures.begin(), kMeasures.end()); });
    py::class_<ImportanceSettings>(m, "ImportanceSettings")
        .def(py::init([](ScoreKind kind, float decay, int observation_window, bool by_values,
                         float expected_lookups) {
                 return ImportanceSettings{kind, decay, observation_window, by_values,
                                           expected_lookups};
             }),
             py::arg("kind"), py::arg("decay") = 0.0f, py::arg("observation_window") = 512,
             py::arg("by_values") = false, py::arg("expected_lookups") = 0.0f)
        .def_readonly("decay", &ImportanceSettings::decay);
}

void register_rope_params(py::module_& m) {
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
        .def_property_readonly("frequencies", [](const RopeParams& self) {
            if (!fits(self, self.offset + self.n_dims))
                throw std::invalid_argument("n_dims, offset and freq_factors are not of one RoPE");
            return rope_frequencies(self);
        });
    m.def(
        "key_centre",
        [](const std::vector<float>& bias, const std::vector<float>& spread, const RopeParams& rope,
           float magnitude) {
            const KeyCentre found = key_centre(bias, spread, rope, magnitude);
            return py::make_tuple(to_array(found.centre), to_array(found.unit));
        },
        py::arg("bias"), py::arg("spread"), py::arg("rope"), py::arg("magnitude") = 1.0f);
    m.def("rope_position", &rope_position, py::arg("position"), py::arg("n_sinks"),
          py::arg("shift"));
}

void register_layer_shape(py::module_& m) {
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
    m.def("kv_types", &kv_type_names);
    m.def("most_entries", &most_entries, py::arg("layer"), py::arg("max_entries"));
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
        "cold_page_bytes",
        [](const std::vector<LayerShape>& layers, const std::string& kv_type,
           const std::string& cold_type) {
            return cold_page_bytes(layers, kv_type_named(kv_type), cold_type_named(cold_type));
        },
        py::arg("layers"), py::arg("kv_type"), py::arg("cold_type"));
}

void register_freeze_settings(py::module_& m) {
    m.attr("RECALL_QUERIES") = kMostQueryRows;
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

}  // namespace

void register_settings(py::module_& m) {
    register_importance(m);
    register_rope_params(m);
    register_layer_shape(m);
    register_freeze_settings(m);
}

}  // namespace entropykv::bind
