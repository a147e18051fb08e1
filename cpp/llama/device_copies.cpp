#include "llama/device_copies.hpp"

#include <ggml.h>

#include <string_view>

namespace entropykv {

// Several nodes may have the same name. The last one is kept, since copies are made of it.
void DeviceCopies::note(const ggml_tensor* node) { last_[node->name] = node; }

std::string DeviceCopies::copied_name(const ggml_tensor* tensor) {
    if (tensor == nullptr || tensor->op != GGML_OP_NONE) return {};
    const std::string_view name = tensor->name;
    const std::size_t first = name.find('#');
    const std::size_t last = name.rfind('#');
    if (first == last) return {};
    return std::string(name.substr(first + 1, last - first - 1));
}

const ggml_tensor* DeviceCopies::source_of(const ggml_tensor* tensor) const {
    const std::string name = copied_name(tensor);
    const auto found = name.empty() ? last_.end() : last_.find(name);
    return found == last_.end() ? tensor : found->second;
}

bool DeviceCopies::is_copied_leaf(const ggml_tensor* tensor) const {
    const std::string name = copied_name(tensor);
    return !name.empty() && last_.count(name) == 0;
}

}  // namespace entropykv
