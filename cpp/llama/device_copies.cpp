#include "llama/device_copies.hpp"

#include <ggml.h>

#include <string_view>

namespace entropykv {

// Several nodes may have the same name. The last one is kept, since copies are made of it.
void DeviceCopies::note(const ggml_tensor* node) { last_[node->name] = node; }

const ggml_tensor* DeviceCopies::source_of(const ggml_tensor* tensor) const {
    if (tensor == nullptr || tensor->op != GGML_OP_NONE) return tensor;
    const std::string_view name = tensor->name;
    const std::size_t first = name.find('#');
    const std::size_t last = name.rfind('#');
    if (first == last) return tensor;
    const auto found = last_.find(std::string(name.substr(first + 1, last - first - 1)));
    return found == last_.end() ? tensor : found->second;
}

}  // namespace entropykv
