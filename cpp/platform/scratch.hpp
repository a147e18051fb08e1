// Sizes scratch vectors to what is needed: they grow at once, and shrink if a quarter would be
// enough, so that needs which vary a little seldom allocate. Also counts the memory of vectors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace entropykv {

// Makes room for at least n values. If the vector shrinks, its contents are lost. Throws
// std::bad_alloc, and keeps its size, if there is no memory.
template <typename T>
void fit(std::vector<T>& values, std::size_t n) {
    if (values.size() > 4 * n) std::vector<T>(n).swap(values);
    if (values.size() < n) values.resize(n);
}

// Makes room for at least n values, and keeps the contents.
template <typename T>
void grow(std::vector<T>& values, std::size_t n) {
    if (values.size() < n) values.resize(n);
}

// Reserves room for n values at least, or for twice as many as before, so that growing in many
// small steps costs little.
template <typename T>
void make_room(std::vector<T>& values, std::size_t n) {
    if (values.capacity() < n) values.reserve(std::max(n, 2 * values.capacity()));
}

template <typename T>
std::size_t bytes_of(const std::vector<T>& values) {
    return values.capacity() * sizeof(T);
}

// Returns how much heap an allocation of `bytes` bytes takes, with the header and the rounding of
// common allocators (that of glibc; others differ by a few bytes).
constexpr std::size_t heap_bytes(std::size_t bytes) {
    constexpr std::size_t kHeader = sizeof(std::size_t), kStep = 16, kLeast = 32;
    return bytes == 0 ? 0 : std::max(kLeast, (bytes + kHeader + kStep - 1) / kStep * kStep);
}

template <typename T>
std::size_t heap_bytes(const std::vector<T>& values) {
    return heap_bytes(bytes_of(values));
}

}  // namespace entropykv
