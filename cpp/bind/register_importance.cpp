// Registers the measures of importance and their settings.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "decide/importance.hpp"

namespace entropykv::bind {

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

}  // namespace entropykv::bind
