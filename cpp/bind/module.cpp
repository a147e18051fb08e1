// Defines the Python module _core.
#include "bind/register.hpp"

PYBIND11_MODULE(_core, m) {
    using namespace entropykv::bind;  // NOLINT: this file only registers
    m.doc() = "Stores, attention and budgets of entropykv";
    register_build(m);
    register_kernels(m);
    register_importance(m);
    register_rope_params(m);
    register_probes(m);
    register_layer_shape(m);
    register_hooks(m);
    register_budget(m);
    register_eviction(m);
    register_freeze_settings(m);
    register_sequence_pool(m);
    register_checkpoint(m);
    register_mapped_file(m);
    register_headwise_store(m);
    register_attention_batch(m);
    register_cache_map(m);
    register_flat_store(m);
    register_device_store(m);
}
