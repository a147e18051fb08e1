// Registers what sequences of one model share: the pool, checkpoints, and files that are mapped
// into memory.
#include "bind/register.hpp"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "attention/headwise_store.hpp"
#include "page/page_codec.hpp"
#include "platform/mapped_file.hpp"
#include "store/checkpoint.hpp"

namespace entropykv::bind {

void register_sequence_pool(py::module_& m) {
    py::class_<SequencePool> pool(m, "SequencePool");
    pool.def(py::init([](const std::vector<LayerShape>& layers, const std::string& kv_type,
                         int max_tokens, int n_sequences, int n_drafts) {
                 return SequencePool(layers, kv_type_named(kv_type), max_tokens, n_sequences,
                                     n_drafts);
             }),
             py::arg("layers"), py::arg("kv_type"), py::arg("max_tokens"), py::arg("n_sequences"),
             py::arg("n_drafts") = 0)
        .def(
            "set_pages", [](SequencePool& self, std::size_t n) { self.store->set_pages(n); },
            py::arg("pages"))
        .def(
            "on_full",
            [](SequencePool& self, std::function<bool()> drop) {
                self.store->on_full(std::move(drop));
            },
            py::arg("drop"))
        .def_property_readonly("scratch_bytes", &SequencePool::scratch_bytes);
    Figures(pool, [](const SequencePool& s) -> const StorePool& { return *s.store; })
        .add("budget_bytes", [](const StorePool& s) { return s.pages().budget_bytes(); })
        .add("used_bytes", [](const StorePool& s) { return s.pages().used_bytes(); })
        .add("peak_bytes", [](const StorePool& s) { return s.pages().peak_bytes(); })
        .add("mapped_bytes", [](const StorePool& s) { return s.pages().mapped_bytes(); })
        .add("staging_bytes", [](const StorePool& s) { return s.staging().bytes(); });
    py::class_<Checkpoint>(m, "Checkpoint")
        .def("drop", &Checkpoint::drop)
        .def("copy", &Checkpoint::copy)
        .def_property_readonly("pages", &Checkpoint::pages)
        .def_property_readonly("is_lost", &Checkpoint::is_lost)
        .def_property_readonly("copied_bytes", &Checkpoint::copied_bytes)
        .def_property_readonly("entries", &Checkpoint::entries)
        .def_property_readonly("evicted", &Checkpoint::evicted);
    py::register_exception<MappedFileError>(m, "MappedFileError", PyExc_OSError);
    py::class_<MappedFile, std::shared_ptr<MappedFile>>(m, "MappedFile", py::buffer_protocol())
        .def_static("map", &MappedFile::map, py::arg("file"), py::arg("offset"), py::arg("n_bytes"))
        .def_property_readonly("has_changed", &MappedFile::has_changed)
        .def_buffer([](MappedFile& self) {
            return py::buffer_info(reinterpret_cast<unsigned char*>(self.data()),
                                   static_cast<py::ssize_t>(self.size()));
        });
}

}  // namespace entropykv::bind
