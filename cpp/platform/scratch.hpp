// Scratch that follows what is asked for: it grows at once, and is given back where a quarter of it
// would do, so that needs which waver a little never allocate.
#pragma once

#include <cstddef>
#include <vector>

namespace entropykv {

// Holds n values at least; what was in it is lost where it shrinks.
template <typename T>
void fit(std::vector<T>& values, std::size_t n) {
    if (values.size() > 4 * n) std::vector<T>().swap(values);
    if (values.size() < n) values.resize(n);
}

// Holds n values at least, and all that is in it.
template <typename T>
void grow(std::vector<T>& values, std::size_t n) {
    if (values.size() < n) values.resize(n);
}

template <typename T>
std::size_t bytes_of(const std::vector<T>& values) {
    return values.capacity() * sizeof(T);
}

}  // namespace entropykv
