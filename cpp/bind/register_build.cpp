// Registers what the extension was built for, and what this machine can run.
#include "bind/register.hpp"

#include <ggml.h>
#include <pybind11/stl.h>

#include "attention/attention.hpp"
#include "bind/arrays.hpp"
#include "llama/built_for.hpp"
#include "platform/bandwidth.hpp"
#include "products/products.hpp"

namespace entropykv::bind {

void register_build(py::module_& m) {
    m.attr("SEQUENCE_STATE_VERSION") = sequence_state_version();
    m.def("ggml_version", &ggml_version);
    m.def("ggml_commit", &ggml_commit);
    m.def("differences", &differences);
    m.def("struct_layouts", [] {
        std::vector<std::tuple<std::string, std::size_t, std::string, std::size_t>> layouts;
        for (const StructLayout& s : struct_layouts())
            layouts.emplace_back(s.name, s.size, s.field, s.offset);
        return layouts;
    });
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
