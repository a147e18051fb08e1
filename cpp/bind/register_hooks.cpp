// Registers the hooks that change llama.cpp's graphs.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "attention/attention_batch.hpp"
#include "bind/hooks.hpp"
#include "llama/device_batch.hpp"
#include "llama/graph_hook.hpp"
#include "llama/weight_hook.hpp"

namespace entropykv::bind {

void register_hooks(py::module_& m) {
    py::class_<AttentionNode>(m, "AttentionNode")
        .def_readonly("cache_layer", &AttentionNode::cache_layer)
        .def_readonly("shape", &AttentionNode::shape)
        .def_readonly("scale", &AttentionNode::scale)
        .def_readonly("softcap", &AttentionNode::softcap)
        .def_readonly("has_sinks", &AttentionNode::has_sinks)
        .def_readonly("rope", &AttentionNode::rope)
        .def_readonly("rope_magnitude", &AttentionNode::rope_magnitude)
        .def_property_readonly("on_device", [](const AttentionNode& self) {
            return !ggml_backend_buft_is_host(self.memory);
        });
    py::class_<WeightHook> weight_hook(m, "WeightHook");
    weight_hook.def(py::init<int, int, int>(), py::arg("relu2_layers"), py::arg("n_threads") = 0,
                    py::arg("few_tokens") = 1);
    register_hook(weight_hook);
    register_products(weight_hook);
    register_times(weight_hook);
    py::class_<GraphHook> graph_hook(m, "GraphHook");
    register_hook(graph_hook);
    register_products(graph_hook);
    register_times(graph_hook);
    graph_hook
        .def(py::init<int, int, int, bool, std::string>(), py::arg("relu2_layers"),
             py::arg("n_threads"), py::arg("few_tokens") = 1, py::arg("on_devices") = false,
             py::arg("products") = "")
        .def(
            "help", [](GraphHook& self, int n) { self.products().help(n); }, py::arg("n_threads"),
            py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("nodes", &GraphHook::nodes)
        .def_property_readonly("refusal", &GraphHook::refusal)
        .def_property_readonly("rope_obstacle", &GraphHook::rope_obstacle)
        .def_property_readonly("rope_limit", &GraphHook::rope_limit)
        .def(
            "serve", [](GraphHook& self, AttentionBatch& batch) { self.serve(batch); },
            py::arg("batch"), py::keep_alive<1, 2>())
        .def("serve_on_devices", &GraphHook::serve_on_devices, py::arg("batch"),
             py::keep_alive<1, 2>());
}

}  // namespace entropykv::bind
