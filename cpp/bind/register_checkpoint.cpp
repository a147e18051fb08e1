// Registers checkpoints, from which forks continue.
#include "bind/register.hpp"

#include "store/checkpoint.hpp"

namespace entropykv::bind {

void register_checkpoint(py::module_& m) {
    py::class_<Checkpoint>(m, "Checkpoint")
        .def("drop", &Checkpoint::drop)
        .def("copy", &Checkpoint::copy)
        .def_property_readonly("is_dropped", &Checkpoint::is_dropped)
        .def_property_readonly("pages", &Checkpoint::pages)
        .def_property_readonly("own_pages", &Checkpoint::own_pages)
        .def_property_readonly("is_lost", &Checkpoint::is_lost)
        .def_property_readonly("copied_bytes", &Checkpoint::copied_bytes)
        .def_property_readonly("entries", &Checkpoint::entries)
        .def_property_readonly("evicted", &Checkpoint::evicted);
}

}  // namespace entropykv::bind
