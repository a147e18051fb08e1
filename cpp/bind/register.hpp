// Declares what module.cpp calls: one function, in a file of its name, for every class or group of
// functions that belong together. They translate arguments and results.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <utility>

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

// Registers figures of a class as properties that are only read; each is what a function of a part
// of the object returns.
template <typename Class, typename Part>
class Figures {
public:
    // part: returns the part of an object.
    Figures(Class& of, Part part) : of_(of), part_(std::move(part)) {}

    template <typename Function>
    Figures& add(const char* name, Function function) {
        of_.def_property_readonly(name, [part = part_, function](const typename Class::type& self) {
            return std::invoke(function, part(self));
        });
        return *this;
    }

private:
    Class& of_;
    Part part_;
};

// Registers a method for one KV head of a store, which must exist: it returns what a function of
// the store's HeadStore and the head's numbers returns.
template <typename Store, typename Function>
void def_of_head(py::class_<Store>& store, const char* name, Function function) {
    store.def(
        name,
        [function](const Store& self, int layer, int head) {
            self.check_head(layer, head);
            return function(self.store, layer, head);
        },
        py::arg("layer"), py::arg("kv_head"));
}

// register_headwise_store() calls this for the methods that save and load.
void register_headwise_state(py::class_<HeadwiseStore>& store);

}  // namespace entropykv::bind
