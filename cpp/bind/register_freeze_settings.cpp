// Registers the settings of cold storage: what is frozen, when, and where to.
#include "bind/register.hpp"

#include <pybind11/stl.h>
#include <cstring>

#include "cold/cold_storage.hpp"
#include "store/head_store.hpp"

namespace entropykv::bind {

void register_freeze_settings(py::module_& m) {
    m.attr("RECALL_QUERIES") = kMostQueryRows;
    py::register_exception<ColdStorageError>(m, "ColdStorageError", PyExc_OSError);
    py::class_<FreezeSchedule>(m, "FreezeSchedule")
        .def(py::init([](int window, float threshold, float rate, int history) {
                 return FreezeSchedule{window, threshold, rate, history};
             }),
             py::arg("window"), py::arg("threshold"), py::arg("rate"), py::arg("history"));
    py::class_<FreezeSettings>(m, "FreezeSettings")
        .def(py::init([](const std::string& kv_type, std::size_t limit_bytes, int recall_interval,
                         const std::optional<FreezeSchedule>& schedule, int descriptor,
                         const py::bytes& nonce) {
                 FreezeSettings settings{cold_type_named(kv_type), limit_bytes, recall_interval,
                                         schedule, descriptor};
                 const std::string bytes = nonce;
                 if (!bytes.empty() && bytes.size() != sizeof settings.nonce)
                     throw std::invalid_argument("a nonce has 16 bytes");
                 std::memcpy(settings.nonce.data(), bytes.data(), bytes.size());
                 return settings;
             }),
             py::arg("kv_type"), py::arg("limit_bytes"), py::arg("recall_interval"),
             py::arg("schedule") = py::none(), py::arg("descriptor") = -1,
             py::arg("nonce") = py::bytes());
}

}  // namespace entropykv::bind
