// Defines the Python module _core.
#include "bind/register.hpp"

PYBIND11_MODULE(_core, m) {
    using namespace entropykv::bind;  // NOLINT: this file only registers
    m.doc() = "Stores, attention and budgets of entropykv";
    register_build(m);
    register_settings(m);
    register_decisions(m);
    register_hooks(m);
    register_sequence_pool(m);
    register_headwise_store(m);
    register_flat_store(m);
    register_device_store(m);
}
