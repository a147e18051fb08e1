// Declares what module.cpp calls: one function, in a file of its name, for every class or group of
// functions that belong together. They translate arguments and results, and compute nothing.
#pragma once

#include <pybind11/pybind11.h>

namespace entropykv {
class HeadwiseStore;
}

namespace entropykv::bind {

namespace py = pybind11;

void register_build(py::module_& m);
void register_settings(py::module_& m);
void register_decisions(py::module_& m);
void register_hooks(py::module_& m);
void register_sequence_pool(py::module_& m);
void register_headwise_store(py::module_& m);
void register_flat_store(py::module_& m);
void register_device_store(py::module_& m);

// register_headwise_store() calls this for the methods that save and load.
void register_headwise_state(py::class_<HeadwiseStore>& store);

}  // namespace entropykv::bind
