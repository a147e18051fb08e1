// Registers files that are mapped into memory.
#include "bind/register.hpp"

#include "platform/mapped_file.hpp"
#include "store/head_store.hpp"

namespace entropykv::bind {

void register_mapped_file(py::module_& m) {
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
