// Prefetches rows of pages. The hardware cannot predict which page comes next, nor which row of it.
#pragma once

#include <cstddef>

namespace entropykv {

inline void prefetch(const std::byte* first, std::size_t bytes) {
    constexpr std::size_t kLine = 64;
    for (std::size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(first + i);
}

}  // namespace entropykv
