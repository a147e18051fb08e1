// What forks and checkpoints share with a store.
#include "bind/register.hpp"

#include <pybind11/functional.h>

#include "attention/headwise.hpp"
#include "store/forks.hpp"
#include "store/head_states.hpp"

namespace entropykv::bind {

void register_headwise_sharing(py::class_<Headwise>& store) {
    store.def("checkpoint", [](Headwise& self) { return make_checkpoint(self.store.parts()); })
        .def(
            "go_on_from",
            [](Headwise& self, Checkpoint& from, bool ends) {
                const py::gil_scoped_release release;
                return go_on_from(self.store, from, ends);
            },
            py::arg("checkpoint"), py::arg("ends"))
        .def(
            "checkpoint_count",
            [](const Headwise& self, const Checkpoint& from, int layer, int head) {
                self.check_head(layer, head);
                return head_of(self.store.parts(), from, layer, head).count;
            },
            py::arg("checkpoint"), py::arg("layer"), py::arg("kv_head"))
        .def(
            "save_checkpoint_head",
            [](const Headwise& self, const Checkpoint& from, int layer, int head) {
                self.check_head(layer, head);
                const HeadSaver saver(self.store.parts());
                const CheckpointHead& saved = head_of(self.store.parts(), from, layer, head);
                py::bytes state(nullptr, saver.bytes(layer, saved));
                saver.save(layer, saved,
                           reinterpret_cast<std::byte*>(PyBytes_AS_STRING(state.ptr())));
                return state;
            },
            py::arg("checkpoint"), py::arg("layer"), py::arg("kv_head"))
        .def(
            "checkpoint_state_bytes",
            [](const Headwise& self, const Checkpoint& from, int layer, int head) {
                self.check_head(layer, head);
                return HeadSaver(self.store.parts())
                    .bytes(layer, head_of(self.store.parts(), from, layer, head));
            },
            py::arg("checkpoint"), py::arg("layer"), py::arg("kv_head"))
        .def(
            "on_full",
            [](Headwise& self, std::function<bool()> drop) {
                self.store.parts().share.pool().on_full(std::move(drop));
            },
            py::arg("drop"));
}

}  // namespace entropykv::bind
