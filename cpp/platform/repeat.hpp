// Repeats a step with constant arguments. Everything is in an unnamed namespace: see simd.hpp.
#pragma once

#include <type_traits>
#include <utility>

#define ENTROPYKV_INLINE __attribute__((always_inline))

namespace entropykv {
namespace {

template <int... I, typename Step>
ENTROPYKV_INLINE inline void repeat_each(std::integer_sequence<int, I...>, Step step) {
    (step(std::integral_constant<int, I>()), ...);
}

// Calls step(0), .. step(N - 1) with constant arguments, so that arrays indexed only by them live
// in registers. GCC unrolls a loop too late for that, and keeps the array in memory.
template <int N, typename Step>
ENTROPYKV_INLINE inline void repeat(Step step) {
    repeat_each(std::make_integer_sequence<int, N>(), step);
}

}  // namespace
}  // namespace entropykv
