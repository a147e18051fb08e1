// Finds the source of a tensor that ggml's scheduler has copied from one device to another. Such a
// copy has no sources; only its name, "<device>#<name>#<number>", says what was copied.
#pragma once

#include <string>
#include <unordered_map>

struct ggml_tensor;

namespace entropykv {

class DeviceCopies {
public:
    // Must be called with every node of a graph in order, while its tensors exist.
    void note(const ggml_tensor* node);
    // Returns the tensor that was copied, or `tensor` itself if it is not a copy or its source is
    // unknown.
    const ggml_tensor* source_of(const ggml_tensor* tensor) const;
    // Tells whether a tensor is a copy of something that no node computes: an input or a weight.
    bool is_copied_leaf(const ggml_tensor* tensor) const;

private:
    static std::string copied_name(const ggml_tensor* tensor);

    std::unordered_map<std::string, const ggml_tensor*> last_;  // finds the last node by its name
};

}  // namespace entropykv
