// What a store has in cold storage.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "attention/headwise.hpp"
#include "bind/arrays.hpp"

namespace entropykv::bind {

void register_headwise_freezing(py::class_<Headwise>& store) {
    store
        .def_property(
            "recalls_now", [](Headwise& self) { return self.attention.recalls_now(); },
            [](Headwise& self, bool on) { self.attention.recalls_now() = on; })
        .def(
            "freeze_all",
            [](Headwise& self, int now) { FrozenHeads(self.store.parts()).freeze_all(now); },
            py::arg("now"))
        .def(
            "restore",
            [](Headwise& self, int now, int frozen_after, int due_after, bool forget) {
                return FrozenHeads(self.store.parts())
                    .restore({frozen_after, due_after}, now, forget);
            },
            py::arg("now"), py::arg("frozen_after") = -1, py::arg("due_after") = -1,
            py::arg("forget") = false)
        .def("stop_freezing", [](Headwise& self) { FrozenHeads(self.store.parts()).stop(); })
        .def(
            "frozen_positions",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return to_array(frozen_positions(self.store.head(layer, head)));
            },
            py::arg("layer"), py::arg("kv_head"))
        .def_property_readonly("frozen", [](const Headwise& s) { return s.store.frozen().now(); })
        .def_property_readonly("frozen_total",
                               [](const Headwise& s) { return s.store.frozen().frozen(); })
        .def_property_readonly("restored_total",
                               [](const Headwise& s) { return s.store.frozen().restored(); })
        .def_property_readonly("recalled_total",
                               [](const Headwise& s) { return s.store.frozen().recalled(); })
        .def_property_readonly("cold_seconds",
                               [](const Headwise& s) { return s.store.frozen().seconds(); })
        .def_property_readonly("cold_bytes",
                               [](const Headwise& s) { return s.store.frozen().bytes(); })
        .def_property_readonly("sketch_bytes",
                               [](const Headwise& s) { return s.store.frozen().sketch_bytes(); })
        .def_property_readonly("cold_overhead_bytes",
                               [](const Headwise& s) { return s.store.frozen().overhead_bytes(); })
        .def_property_readonly("cold_file_bytes",
                               [](const Headwise& s) { return s.store.frozen().file_bytes(); })
        .def_property_readonly("cold_failure", [](const Headwise& s) -> std::optional<std::string> {
            const char* why = s.store.frozen().failure();
            if (why == nullptr) return std::nullopt;
            return why;
        });
}

}  // namespace entropykv::bind
