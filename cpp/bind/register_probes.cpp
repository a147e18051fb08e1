// Registers the probes, which read graphs and change nothing.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "bind/hooks.hpp"
#include "llama/rope_probe.hpp"
#include "llama/window_probe.hpp"

namespace entropykv::bind {

void register_probes(py::module_& m) {
    py::class_<KShiftProbe> probe(m, "KShiftProbe");
    register_callback(probe);
    probe.def(py::init<>()).def_property_readonly("obstacle", &KShiftProbe::obstacle);
    py::class_<WindowProbe> windows(m, "WindowProbe");
    register_callback(windows);
    windows.def(py::init<>())
        .def_property_readonly("visible", &WindowProbe::visible)
        .def("clear", &WindowProbe::clear);
}

}  // namespace entropykv::bind
