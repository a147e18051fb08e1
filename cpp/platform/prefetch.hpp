// Rows of pages that will be read soon: asked for early, since the hardware sees neither one page
// coming after another nor one row of many.
#pragma once

#include <cstddef>

namespace entropykv {

inline void ask_for(const std::byte* first, std::size_t bytes) {
    constexpr std::size_t kLine = 64;
    for (std::size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(first + i);
}

}  // namespace entropykv
