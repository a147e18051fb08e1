// Registers the shape of a layer, and the sizes of the pages that hold its entries.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "bind/arrays.hpp"
#include "page/page_codec.hpp"
#include "store/head_store.hpp"

namespace entropykv::bind {

void register_layer_shape(py::module_& m) {
    py::class_<LayerShape>(m, "LayerShape")
        .def(py::init([](int n_head, int n_head_kv, int k_dim, int v_dim, int window, bool chunked,
                         bool latent, int readers) {
                 return LayerShape{n_head, n_head_kv, k_dim,  v_dim,
                                   window, chunked,   latent, readers};
             }),
             py::arg("n_head"), py::arg("n_head_kv"), py::arg("k_dim"), py::arg("v_dim"),
             py::arg("window") = 0, py::arg("chunked") = false, py::arg("latent") = false,
             py::arg("readers") = 1)
        .def_readonly("n_head", &LayerShape::n_head)
        .def_readonly("n_head_kv", &LayerShape::n_head_kv)
        .def_readonly("k_dim", &LayerShape::k_dim)
        .def_readonly("v_dim", &LayerShape::v_dim)
        .def_readonly("window", &LayerShape::window)
        .def_readonly("chunked", &LayerShape::chunked)
        .def_readonly("latent", &LayerShape::latent)
        .def_readonly("readers", &LayerShape::readers)
        .def_property_readonly("entry_values", &LayerShape::entry_values)
        .def(
            "with_window",
            [](LayerShape shape, int window, bool chunked) {
                shape.window = window;
                shape.chunked = chunked;
                return shape;
            },
            py::arg("window"), py::arg("chunked"));
    m.def("kv_types", &kv_type_names);
    m.def("most_entries", &most_entries, py::arg("layer"), py::arg("max_entries"));
    m.def(
        "page_geometry",
        [](const std::vector<LayerShape>& layers, const std::string& kv_type) {
            const std::vector<PageLayout> layouts = page_layouts(layers, kv_type_named(kv_type));
            std::vector<int> entries;
            for (const PageLayout& layout : layouts) entries.push_back(layout.entries);
            return py::make_tuple(pool_page_bytes(layers, kv_type_named(kv_type)), entries);
        },
        py::arg("layers"), py::arg("kv_type"));
    m.def(
        "cold_page_bytes",
        [](const std::vector<LayerShape>& layers, const std::string& kv_type,
           const std::string& cold_type) {
            return cold_page_bytes(layers, kv_type_named(kv_type), cold_type_named(cold_type));
        },
        py::arg("layers"), py::arg("kv_type"), py::arg("cold_type"));
}

}  // namespace entropykv::bind
