// What forks and checkpoints share with a store.
#include "bind/register.hpp"

#include <pybind11/functional.h>

#include "attention/headwise.hpp"
#include "store/checkpoint.hpp"

namespace entropykv::bind {

void register_headwise_sharing(py::class_<Headwise>& store) {
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

}  // namespace entropykv::bind
