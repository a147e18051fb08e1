// Registers the micro-batch that holds tokens of several sequences.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "attention/attention_batch.hpp"
#include "attention/headwise.hpp"

namespace entropykv::bind {

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

}  // namespace entropykv::bind
