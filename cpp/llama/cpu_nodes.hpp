// Which nodes of a graph are the CPU backend's own. ggml's scheduler gives nodes to other devices,
// too, and some of these work in plain memory as the CPU does (BLAS, ZenDNN, OpenVINO): where a
// node's buffer is says nothing then. A custom op in the hands of such a device ends the process.
#pragma once

struct ggml_tensor;

namespace entropykv {

// False where any other device that is there may have been given the node: one that computes such
// a node, and works in its memory. To be asked before the node is changed.
bool is_of_cpu(const ggml_tensor* node);

}  // namespace entropykv
