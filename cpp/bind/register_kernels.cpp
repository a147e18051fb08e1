// Registers which kernels this machine can run.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "attention/attention.hpp"
#include "bind/arrays.hpp"
#include "platform/bandwidth.hpp"
#include "products/products.hpp"

namespace entropykv::bind {

void register_kernels(py::module_& m) {
    m.def("read_bandwidth", &read_bandwidth, py::arg("n_bytes"), py::arg("n_threads"),
          py::call_guard<py::gil_scoped_release>());
    m.def("available_kernels", [] {
        std::vector<std::string> names;
        for (const KernelTable* table : available_kernels()) names.emplace_back(table->name);
        return names;
    });
    m.def(
        "alibi_slopes",
        [](int n_head, float max_bias) { return to_array(alibi_slopes(n_head, max_bias)); },
        py::arg("n_head"), py::arg("max_bias"));
    m.def("product_kernels", [] {
        std::vector<std::string> names;
        for (const ProductTable* table : available_products()) names.emplace_back(table->name);
        return names;
    });
}

}  // namespace entropykv::bind
