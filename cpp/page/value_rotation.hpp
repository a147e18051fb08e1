// Rotates blocks of values before they are rounded to a few bits, so that no value of a block is
// much larger than the others. The rotation is a Hadamard matrix divided by the root of its size,
// and its own inverse. It only adds and subtracts in a fixed order, so that every instruction set
// computes the same bits. Everything is in an unnamed namespace: see platform/simd.hpp.
#pragma once

#include "page/page_layout.hpp"

namespace entropykv {
namespace {

constexpr float kRotationScale = 0.176776695f;  // 1 / sqrt(kQuantBlock)

// Rotates kQuantBlock values. Every pass moves the sums of neighbours to the front and their
// differences to the back, so that all passes are the same loop, which compilers vectorise.
inline void rotate_block(float* values) {
    constexpr int half = kQuantBlock / 2;
    float other[kQuantBlock];
    for (int i = 0; i < kQuantBlock; ++i) values[i] *= kRotationScale;
    for (int size = 1; size < kQuantBlock; size *= 2) {
        for (int i = 0; i < half; ++i) {
            other[i] = values[2 * i] + values[2 * i + 1];
            other[i + half] = values[2 * i] - values[2 * i + 1];
        }
        for (int i = 0; i < kQuantBlock; ++i) values[i] = other[i];
    }
}

}  // namespace
}  // namespace entropykv
