// What session files hold of a store.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "attention/headwise.hpp"
#include "bind/arrays.hpp"
#include "store/head_states.hpp"

namespace entropykv::bind {
namespace {

// The end of the state of a head that has dropped nothing; empty where that is not counted.
py::bytes nothing_dropped(const Headwise& self) {
    std::string state;
    if (self.store.head(0, 0).dropped) {
        state.resize(DroppedScores::state_bytes());
        DroppedScores{}.save(reinterpret_cast<std::byte*>(state.data()));
    }
    return state;
}

}  // namespace

void register_headwise_state(py::class_<Headwise>& store) {
    const auto data = [](const py::bytearray& state) {
        return reinterpret_cast<std::byte*>(PyByteArray_AS_STRING(state.ptr()));
    };
    store
        .def(
            "state_bytes",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                return HeadSaver(self.store.parts()).bytes(layer, head);
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "save_head",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                const HeadSaver saver(self.store.parts());
                py::bytes state(nullptr, saver.bytes(layer, head));
                saver.save(layer, head,
                           reinterpret_cast<std::byte*>(PyBytes_AS_STRING(state.ptr())));
                return state;
            },
            py::arg("layer"), py::arg("kv_head"))
        .def(
            "state_problem",
            [data](const Headwise& self, int layer, int count, const py::bytearray& state,
                   int end) {
                self.shape_of(layer);
                return HeadSaver(self.store.parts())
                    .problem(layer, count, data(state), state.size(), end);
            },
            py::arg("layer"), py::arg("count"), py::arg("state"), py::arg("end"))
        .def(
            "begin_load",
            [data](Headwise& self, const std::vector<int>& counts,
                   const std::vector<py::bytearray>& states, const std::vector<int>& budgets) {
                std::vector<const std::byte*> starts;
                for (const py::bytearray& state : states) starts.push_back(data(state));
                HeadLoader(self.store.parts()).begin(counts, starts, budgets);
            },
            py::arg("counts"), py::arg("states"), py::arg("budgets"))
        .def_property_readonly("nothing_dropped", &nothing_dropped)
        .def(
            "set_evicted",
            [](Headwise& self, std::size_t evicted) {
                self.store.parts().common.evicted = evicted;
            },
            py::arg("evicted"))
        .def(
            "load_head",
            [data](Headwise& self, int layer, int head, int count, const py::bytearray& state) {
                self.check_head(layer, head);
                HeadLoader(self.store.parts()).load(layer, head, count, data(state));
            },
            py::arg("layer"), py::arg("kv_head"), py::arg("count"), py::arg("state"));
}

}  // namespace entropykv::bind
