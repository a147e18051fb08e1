// Products that are multiplied with one number, the scale of a whole matrix of ternary weights:
// llama.cpp calls a function for every value of such a node, which took a seventh of the time of 8
// tokens of a 2B BitNet. Ours gives the same bits.
#pragma once

struct ggml_tensor;

namespace entropykv {

// Changes the node if it multiplies rows of f32 with one number.
void change_scaling(ggml_tensor* node);

// Whether a node was changed so.
bool is_scaling(const ggml_tensor* node);

}  // namespace entropykv
