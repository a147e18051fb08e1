// Converts between f16 and f32 without special instructions.
#pragma once

#include <cstdint>
#include <cstring>

namespace entropykv {
namespace {

inline float half_to_float(std::uint16_t half) {
    const std::uint32_t shifted = (half & 0x7fffu) << 13;
    float magnitude;
    std::memcpy(&magnitude, &shifted, sizeof magnitude);
    magnitude *= 0x1p112f;  // moves the exponent bias of f16 to that of f32; works for subnormals
    std::uint32_t bits;
    std::memcpy(&bits, &magnitude, sizeof bits);
    bits |= static_cast<std::uint32_t>(half & 0x8000u) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::uint16_t float_to_half(float value) {
    // Rounds to nearest even, and saturates to the largest finite f16, because an infinity in the
    // store would turn every later attention row into NaN.
    constexpr float largest = 65504.0f;
    value = value > largest ? largest : value < -largest ? -largest : value;
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    float absolute;
    std::memcpy(&absolute, &magnitude, sizeof absolute);
    if (absolute < 0x1p-14f) {
        const float steps = absolute * 0x1p24f + 0x1p23f;  // adding 2^23 rounds to an integer
        std::uint32_t rounded;
        std::memcpy(&rounded, &steps, sizeof rounded);
        return static_cast<std::uint16_t>(sign | (rounded & 0x7ffu));
    }
    const std::uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<std::uint16_t>(sign | ((magnitude + 0xfffu + odd - 0x38000000u) >> 13));
}

}  // namespace
}  // namespace entropykv
