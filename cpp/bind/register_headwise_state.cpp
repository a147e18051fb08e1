// Registers how files of sessions and checkpoints get their contents from a store.
#include "bind/register.hpp"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "attention/headwise_store.hpp"
#include "bind/arrays.hpp"
#include "platform/system_memory.hpp"
#include "store/checkpoint.hpp"
#include "store/head_states.hpp"

namespace entropykv::bind {
namespace {

void register_checkpoints(py::class_<HeadwiseStore>& store) {
    store
        .def("checkpoint",
             [](HeadwiseStore& self) { return make_checkpoint(self.store.components()); })
        .def(
            "fork_from",
            [](HeadwiseStore& self, Checkpoint& from, bool ends) {
                const py::gil_scoped_release release;
                return fork_from(self.store, from, ends);
            },
            py::arg("checkpoint"), py::arg("ends"))
        .def(
            "checkpoint_count",
            [](const HeadwiseStore& self, const Checkpoint& from, int layer, int head) {
                self.check_head(layer, head);
                return checkpoint_head(self.store.components(), from, layer, head).count;
            },
            py::arg("checkpoint"), py::arg("layer"), py::arg("kv_head"))
        .def(
            "save_checkpoint_head",
            [](const HeadwiseStore& self, const Checkpoint& from, int layer, int head) {
                self.check_head(layer, head);
                const HeadSaver saver(self.store.components());
                const CheckpointHead& saved =
                    checkpoint_head(self.store.components(), from, layer, head);
                py::bytes state(nullptr, saver.bytes(layer, saved));
                saver.save(layer, saved,
                           reinterpret_cast<std::byte*>(PyBytes_AS_STRING(state.ptr())));
                return state;
            },
            py::arg("checkpoint"), py::arg("layer"), py::arg("kv_head"))
        .def(
            "checkpoint_state_bytes",
            [](const HeadwiseStore& self, const Checkpoint& from, int layer, int head) {
                self.check_head(layer, head);
                return HeadSaver(self.store.components())
                    .bytes(layer, checkpoint_head(self.store.components(), from, layer, head));
            },
            py::arg("checkpoint"), py::arg("layer"), py::arg("kv_head"))
        .def(
            "on_full",
            [](HeadwiseStore& self, std::function<bool()> drop) {
                self.store.components().share.pool().on_full(std::move(drop));
            },
            py::arg("drop"));
}

}  // namespace

void register_headwise_state(py::class_<HeadwiseStore>& store) {
    register_checkpoints(store);
    def_of_head(store, "state_bytes", [](const HeadStore& self, int layer, int head) {
        return HeadSaver(self.components()).bytes(layer, head);
    });
    def_of_head(store, "state_padding", [](const HeadStore& self, int layer, int head) {
        return HeadSaver(self.components()).padding(layer, head);
    });
    def_of_head(store, "save_head", [](const HeadStore& self, int layer, int head) {
        const HeadSaver saver(self.components());
        py::bytes state(nullptr, saver.bytes(layer, head));
        saver.save(layer, head, reinterpret_cast<std::byte*>(PyBytes_AS_STRING(state.ptr())));
        return state;
    });
    store
        .def(
            "state_problem",
            [](const HeadwiseStore& self, int layer, int count, const py::buffer& state, int end) {
                self.shape_of(layer);
                const WritableBytes bytes = bytes_of(state);
                return HeadSaver(self.store.components())
                    .problem(layer, count, bytes.data, bytes.size, end);
            },
            py::arg("layer"), py::arg("count"), py::arg("state"), py::arg("end"))
        .def(
            "begin_load",
            [](HeadwiseStore& self, const std::vector<int>& counts,
               const std::vector<py::buffer>& states, const std::vector<int>& budgets) {
                HeadLoader(self.store.components())
                    .begin(counts, addresses_of<const std::byte>(states), budgets);
            },
            py::arg("counts"), py::arg("states"), py::arg("budgets"))
        .def(
            "adopt",
            [](HeadwiseStore& self, const std::shared_ptr<MappedFile>& file,
               const std::vector<int>& counts, const std::vector<py::buffer>& states) {
                return HeadLoader(self.store.components())
                    .adopt(file, counts, addresses_of<const std::byte>(states));
            },
            py::arg("file").none(false), py::arg("counts"), py::arg("states"))
        .def("check_files", [](HeadwiseStore& self) { self.store.check_files(); })
        .def(
            "load_head",
            [](HeadwiseStore& self, int layer, int head, int count, const py::buffer& state) {
                self.check_head(layer, head);
                const WritableBytes bytes = bytes_of(state);
                HeadLoader(self.store.components()).load(layer, head, count, bytes.data);
                discard_memory(bytes.data, bytes.size);
            },
            py::arg("layer"), py::arg("kv_head"), py::arg("count"), py::arg("state"));
}

}  // namespace entropykv::bind
