// Tells which nodes of a graph the CPU backend will compute. ggml's scheduler gives nodes to other
// devices, too, and some of these work in plain memory like the CPU (BLAS, ZenDNN, OpenVINO), so
// the buffer of a node does not tell. If such a device got a custom op, the process would abort.
#pragma once

struct ggml_tensor;

namespace entropykv {

// Returns false if any other device supports the node and can use its memory. Must be called before
// the node is changed.
bool is_of_cpu(const ggml_tensor* node);

}  // namespace entropykv
