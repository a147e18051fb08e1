// Memory of weights that is asked for early: the hardware does not see that several rows, each read
// on its own, are one stretch, and what comes after them. Without it, one token goes at a third of
// the speed of memory.
#pragma once

#include <cstddef>

namespace entropykv {
namespace {

constexpr std::size_t kLine = 64;
// How far ahead of the rows that are multiplied with one token.
constexpr std::size_t kAhead = 8192;

inline void ask_for_bytes(const std::byte* first, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(first + i);
}

}  // namespace
}  // namespace entropykv
