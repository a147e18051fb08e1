// Scratch that follows what is asked for: it grows at once, and is given back where a quarter of it
// would do, so that needs which waver a little never allocate. And what vectors take of memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace entropykv {

// Holds n values at least; what was in it is lost where it shrinks. Where there is no memory, it
// has no fewer values than before.
template <typename T>
void fit(std::vector<T>& values, std::size_t n) {
    if (values.size() > 4 * n) std::vector<T>(n).swap(values);
    if (values.size() < n) values.resize(n);
}

// Holds n values at least, and all that is in it.
template <typename T>
void grow(std::vector<T>& values, std::size_t n) {
    if (values.size() < n) values.resize(n);
}

// Room for n values at least, or for twice as many as there was: so that many small steps cost no
// more than few large ones.
template <typename T>
void make_room(std::vector<T>& values, std::size_t n) {
    if (values.capacity() < n) values.reserve(std::max(n, 2 * values.capacity()));
}

template <typename T>
std::size_t bytes_of(const std::vector<T>& values) {
    return values.capacity() * sizeof(T);
}

// What an allocation of so many bytes takes of the heap, with the header and the steps of the
// allocators that are in use (glibc's, whose words others keep to within a few bytes).
constexpr std::size_t heap_bytes(std::size_t bytes) {
    constexpr std::size_t kHeader = sizeof(std::size_t), kStep = 16, kLeast = 32;
    return bytes == 0 ? 0 : std::max(kLeast, (bytes + kHeader + kStep - 1) / kStep * kStep);
}

template <typename T>
std::size_t heap_bytes(const std::vector<T>& values) {
    return heap_bytes(bytes_of(values));
}

}  // namespace entropykv
