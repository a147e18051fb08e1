// Registers the map of held and frozen positions; arrays are bytes, (KV heads of all layers,
// columns).
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "attention/headwise.hpp"
#include "bind/arrays.hpp"
#include "store/cache_map.hpp"

namespace entropykv::bind {

void register_cache_map(py::module_& m) {
    py::class_<CacheMap>(m, "CacheMap")
        .def(py::init<>())
        .def(
            "count",
            [](CacheMap& self, const HeadwiseStore& store, std::int32_t first, int per_column,
               int n_columns) {
                if (first < 0 || per_column < 1 || n_columns < 1)
                    throw std::invalid_argument("columns must be 1 or more, from 0 or later on");
                {
                    const py::gil_scoped_release release;
                    self.count(store.store, first, per_column, n_columns);
                }
                const auto rows = [n_columns](const std::vector<std::uint8_t>& shares) {
                    const auto n = static_cast<py::ssize_t>(shares.size()) / n_columns;
                    return py::array_t<std::uint8_t>({n, py::ssize_t{n_columns}}, shares.data());
                };
                return py::make_tuple(rows(self.held()), rows(self.frozen()),
                                      rows(self.restored()));
            },
            py::arg("store"), py::arg("first"), py::arg("per_column"), py::arg("n_columns"));
}

}  // namespace entropykv::bind
