// Registers the store that evicts whole positions from llama.cpp's own cache.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "bind/arrays.hpp"
#include "llama/flat_store.hpp"

namespace entropykv::bind {

void register_flat_store(py::module_& m) {
    const auto context = [](std::uintptr_t address) {
        return reinterpret_cast<llama_context*>(address);
    };
    py::class_<FlatStore>(m, "FlatStore")
        .def(py::init([context](std::uintptr_t address, int budget, ScoreKind score, int n_sinks,
                                int recent_window, int rope_sinks) {
                 return std::make_unique<FlatStore>(context(address), budget, score,
                                                    Protection{n_sinks, recent_window}, rope_sinks);
             }),
             py::arg("context"), py::arg("budget"), py::arg("score"), py::arg("n_sinks"),
             py::arg("recent_window"), py::arg("rope_sinks"))
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
            [](FlatStore& self, std::vector<std::int32_t> positions, const py::buffer& state,
               std::size_t evicted, int shift) {
                const WritableBytes bytes = bytes_of(state);
                self.load_state(std::move(positions),
                                reinterpret_cast<const std::uint8_t*>(bytes.data), bytes.size,
                                evicted, shift);
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
        .def_property_readonly("largest_copy", &FlatStore::largest_copy)
        .def_property_readonly("eviction_seconds", &FlatStore::eviction_seconds);
}

}  // namespace entropykv::bind
