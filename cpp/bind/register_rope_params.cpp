// Registers the parameters by which a model rotates its keys.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "bind/arrays.hpp"
#include "decide/key_centre.hpp"
#include "decide/rope_params.hpp"

namespace entropykv::bind {

void register_rope_params(py::module_& m) {
    py::class_<RopeParams>(m, "RopeParams")
        .def(py::init([](int n_dims, int offset, bool neox, int n_ctx_orig, float freq_base,
                         float freq_scale, float ext_factor, float beta_fast, float beta_slow,
                         std::vector<float> freq_factors) {
                 return RopeParams{
                     n_dims,     offset,     neox,      n_ctx_orig, freq_base,
                     freq_scale, ext_factor, beta_fast, beta_slow,  std::move(freq_factors)};
             }),
             py::arg("n_dims"), py::arg("offset") = 0, py::arg("neox") = false,
             py::arg("n_ctx_orig") = 0, py::arg("freq_base") = 10000.0f,
             py::arg("freq_scale") = 1.0f, py::arg("ext_factor") = 0.0f,
             py::arg("beta_fast") = 0.0f, py::arg("beta_slow") = 0.0f,
             py::arg("freq_factors") = std::vector<float>{})
        .def_readonly("n_dims", &RopeParams::n_dims)
        .def_readonly("offset", &RopeParams::offset)
        .def_readonly("neox", &RopeParams::neox)
        .def_readonly("n_ctx_orig", &RopeParams::n_ctx_orig)
        .def_readonly("freq_base", &RopeParams::freq_base)
        .def_readonly("freq_scale", &RopeParams::freq_scale)
        .def_readonly("ext_factor", &RopeParams::ext_factor)
        .def_readonly("beta_fast", &RopeParams::beta_fast)
        .def_readonly("beta_slow", &RopeParams::beta_slow)
        .def_readonly("freq_factors", &RopeParams::freq_factors)
        .def_property_readonly("frequencies", &rope_frequencies);
    m.def(
        "key_centre",
        [](const std::vector<float>& bias, const std::vector<float>& spread, const RopeParams& rope,
           float magnitude) {
            const KeyCentre found = key_centre(bias, spread, rope, magnitude);
            return py::make_tuple(to_array(found.centre), to_array(found.unit));
        },
        py::arg("bias"), py::arg("spread"), py::arg("rope"), py::arg("magnitude") = 1.0f);
    m.def("rope_position", &rope_position, py::arg("position"), py::arg("n_sinks"),
          py::arg("shift"));
}

}  // namespace entropykv::bind
