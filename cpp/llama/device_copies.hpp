// Finds the source of a tensor that ggml's scheduler has copied from one device to another. The
// copy is a tensor without sources; only its name, "<device>#<name>#<number>", tells what it is of.
#pragma once

#include <string>
#include <unordered_map>

struct ggml_tensor;

namespace entropykv {

class DeviceCopies {
public:
    // To be called with every node of a graph, in their order, as long as its tensors live.
    void note(const ggml_tensor* node);
    // The tensor that was copied; `tensor` itself where it is no copy, or one of an unknown tensor.
    const ggml_tensor* source_of(const ggml_tensor* tensor) const;

private:
    std::unordered_map<std::string, const ggml_tensor*> last_;  // by their names
};

}  // namespace entropykv
