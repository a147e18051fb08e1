// Registers the methods that several hooks have in common.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "llama/node_times.hpp"

namespace entropykv::bind {

namespace py = pybind11;

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

// Registers what hooks that replace products of weights report.
template <typename Hook>
void register_products(py::class_<Hook>& hook) {
    hook.def_property_readonly("products",
                               [](const Hook& self) { return self.products().computed_by(); })
        .def_property_readonly("products_scratch_bytes",
                               [](const Hook& self) { return self.products().scratch_bytes(); });
}

// Registers how hooks time the nodes of graphs.
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

}  // namespace entropykv::bind
