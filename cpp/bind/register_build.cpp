// Registers what the extension was built for.
#include "bind/register.hpp"

#include <ggml.h>
#include <pybind11/stl.h>

#include "llama/built_for.hpp"

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
}

}  // namespace entropykv::bind
