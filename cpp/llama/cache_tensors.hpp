// Finds the tensors of llama.cpp's cache by their names, and frees their memory.
#pragma once

#include <ggml.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace entropykv {

constexpr const char* kCacheK = "cache_k_l";
constexpr const char* kCacheV = "cache_v_l";

inline const ggml_tensor* root_of(const ggml_tensor* tensor) {
    while (tensor->view_src != nullptr) tensor = tensor->view_src;
    return tensor;
}

// Returns N if the tensor is a view of cache_<which>_l<N>, otherwise -1.
inline int cache_layer_of(const ggml_tensor* tensor, const char* prefix) {
    if (tensor == nullptr) return -1;
    const char* name = root_of(tensor)->name;
    const std::size_t length = std::strlen(prefix);
    return std::strncmp(name, prefix, length) == 0 ? std::atoi(name + length) : -1;
}

// Gives the memory of llama.cpp's cache cells back to the system, once our nodes have replaced all
// reads and writes of them. If anything did read them, it would find zeros.
inline void release_cells(const ggml_tensor* cache) {
#if defined(MADV_DONTNEED)
    const auto system_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<std::size_t>(cache->data);
    const std::size_t first = (start + system_page - 1) / system_page * system_page;
    const std::size_t last = (start + ggml_nbytes(cache)) / system_page * system_page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
    (void)cache;
#endif
}

}  // namespace entropykv
