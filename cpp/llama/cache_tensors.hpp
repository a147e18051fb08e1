// Finds the tensors of llama.cpp's cache by their names, and frees their memory.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "platform/system_memory.hpp"

namespace entropykv {

constexpr const char* kCacheK = "cache_k_l";
constexpr const char* kCacheV = "cache_v_l";

inline const ggml_tensor* root_of(const ggml_tensor* tensor) {
    while (tensor->view_src != nullptr) tensor = tensor->view_src;
    return tensor;
}

// Returns N if the tensor is a view of cache_<which>_l<N>, or the copy of one on another device,
// whose name is "<device>#<name>#<number>"; otherwise -1.
inline int cache_layer_of(const ggml_tensor* tensor, const char* prefix) {
    if (tensor == nullptr) return -1;
    const char* name = root_of(tensor)->name;
    if (const char* mark = std::strchr(name, '#'); mark != nullptr) name = mark + 1;
    const std::size_t length = std::strlen(prefix);
    return std::strncmp(name, prefix, length) == 0 ? std::atoi(name + length) : -1;
}

// Gives the memory of llama.cpp's cache cells back to the system, once our nodes have replaced all
// reads and writes of them. Nothing reads them any more, so that their content does not matter.
inline void release_cells(const ggml_tensor* cache) {
    discard_memory(cache->data, ggml_nbytes(cache));
}

}  // namespace entropykv
