// Rotates blocks of values before they are rounded to a few bits, so that no value of a block is
// much larger than the others. The rotation is a Hadamard matrix divided by the root of its size,
// and its own inverse. It multiplies by one constant, and then adds and subtracts in a fixed order,
// so that every instruction set computes the same bits. Unnamed namespace: see platform/simd.hpp.
#pragma once

#include "page/page_layout.hpp"
#include "platform/repeat.hpp"
#include "platform/simd.hpp"

namespace entropykv {
namespace {

constexpr float kRotationScale = 0.176776695f;  // 1 / sqrt(kQuantBlock)
constexpr int kRotationPasses = 5;              // 2^5 = kQuantBlock
static_assert(1 << kRotationPasses == kQuantBlock);

// Rotates kQuantBlock values. Every pass moves the sums of neighbours to the front and their
// differences to the back, so that all passes are the same. The values stay in registers.
inline void rotate_block(float* values) {
    constexpr int vectors = kQuantBlock / kLanes;
    Vec block[vectors];
    repeat<vectors>([&](auto i) ENTROPYKV_INLINE {
        block[i] = load(values + i * kLanes) * broadcast(kRotationScale);
    });
    repeat<kRotationPasses>([&](auto) ENTROPYKV_INLINE {
        Vec turned[vectors];
        repeat<vectors / 2>([&](auto i) ENTROPYKV_INLINE {
            const Vec even = even_lanes(block[2 * i], block[2 * i + 1]);
            const Vec odd = odd_lanes(block[2 * i], block[2 * i + 1]);
            turned[i] = even + odd;
            turned[i + vectors / 2] = even - odd;
        });
        repeat<vectors>([&](auto i) ENTROPYKV_INLINE { block[i] = turned[i]; });
    });
    repeat<vectors>([&](auto i) ENTROPYKV_INLINE { store(values + i * kLanes, block[i]); });
}

}  // namespace
}  // namespace entropykv
