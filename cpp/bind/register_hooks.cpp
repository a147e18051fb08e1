// Registers what sees llama.cpp's graphs: probes, which change nothing, and hooks that change them.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "attention/attention.hpp"
#include "llama/device_rewrite.hpp"
#include "llama/graph_hook.hpp"
#include "llama/weight_hook.hpp"
#include "llama/window_probe.hpp"

namespace entropykv::bind {
namespace {

// Registers the two addresses that llama_context_params needs of every hook.
template <typename Hook>
void register_callback(py::class_<Hook>& hook) {
    hook.def_property_readonly(
            "callback",
            [](const Hook&) { return reinterpret_cast<std::uintptr_t>(&Hook::on_node); })
        .def_property_readonly("user_data",
                               [](Hook& self) { return reinterpret_cast<std::uintptr_t>(&self); });
}

// Registers what hooks that change graphs do around every llama_decode.
template <typename Hook>
void register_hook(py::class_<Hook>& hook) {
    register_callback(hook);
    hook.def("begin_step", &Hook::begin_step).def("check_step", &Hook::check_step);
}

template <typename Hook>
void register_products(py::class_<Hook>& hook) {
    hook.def_property_readonly("products",
                               [](const Hook& self) { return self.products().computed_by(); })
        .def_property_readonly("products_scratch_bytes",
                               [](const Hook& self) { return self.products().scratch_bytes(); });
}

template <typename Hook>
void register_times(py::class_<Hook>& hook) {
    hook.def(
            "measure_work", [](Hook& self, bool on) { self.times().measure(on); }, py::arg("on"))
        .def_property_readonly("work", [](Hook& self) {
            std::map<std::string, std::array<double, 3>> found;
            for (const auto& [name, work] : {std::pair{"weights", Work::weights},
                                             {"attention", Work::attention},
                                             {"rest", Work::rest}}) {
                const WorkTime time = self.times().of(work);
                found[name] = {time.seconds, time.operations, time.bytes};
            }
            return found;
        });
}

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

}  // namespace

void register_hooks(py::module_& m) {
    py::register_exception<GraphError>(m, "GraphError", PyExc_RuntimeError);
    register_probes(m);
    py::class_<AttentionNode>(m, "AttentionNode")
        .def_readonly("cache_layer", &AttentionNode::cache_layer)
        .def_readonly("shape", &AttentionNode::shape)
        .def_readonly("scale", &AttentionNode::scale)
        .def_readonly("softcap", &AttentionNode::softcap)
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
