// The tensors of llama.cpp's cache, by their names.
#pragma once

#include <ggml.h>

#include <cstdlib>
#include <cstring>

namespace entropykv {

constexpr const char* kCacheK = "cache_k_l";
constexpr const char* kCacheV = "cache_v_l";

inline const ggml_tensor* root_of(const ggml_tensor* tensor) {
    while (tensor->view_src != nullptr) tensor = tensor->view_src;
    return tensor;
}

// N of a view of cache_<which>_l<N>; -1 for anything else.
inline int cache_layer_of(const ggml_tensor* tensor, const char* prefix) {
    if (tensor == nullptr) return -1;
    const char* name = root_of(tensor)->name;
    const std::size_t length = std::strlen(prefix);
    return std::strncmp(name, prefix, length) == 0 ? std::atoi(name + length) : -1;
}

}  // namespace entropykv
