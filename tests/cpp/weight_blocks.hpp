// Makes random blocks of ggml's types of weights, and decodes them one value at a time, by the
// definition of the formats and not by the kernels of products.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "platform/half.hpp"
#include "products/product_kernels.hpp"

namespace entropykv {

struct BlockFormat {
    WeightType type;
    int values;
    int bytes;
    std::vector<int> halves;  // bytes of a block at which f16 scales begin

    // Tells whether activations are rounded; for f16 weights they are not.
    bool rounds() const { return type != WeightType::f16; }
};

inline const std::vector<BlockFormat>& block_formats() {
    static const std::vector<BlockFormat> formats{
        {WeightType::q4_0, 32, 18, {0}},      {WeightType::q4_1, 32, 20, {0, 2}},
        {WeightType::q8_0, 32, 34, {0}},      {WeightType::q4_k, 256, 144, {0, 2}},
        {WeightType::q5_k, 256, 176, {0, 2}}, {WeightType::q6_k, 256, 210, {208}},
        {WeightType::tq1_0, 256, 54, {52}},   {WeightType::tq2_0, 256, 66, {64}},
        {WeightType::q5_0, 32, 22, {0}},      {WeightType::q5_1, 32, 24, {0, 2}},
        {WeightType::f16, 1, 2, {0}},
    };
    return formats;
}

// Makes random codes, and scales of either sign that differ by a factor of 8.
inline std::vector<std::byte> random_blocks(std::mt19937& random, const BlockFormat& format,
                                            int n_blocks) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(n_blocks * format.bytes));
    std::uniform_int_distribution<int> byte(0, 255);
    std::uniform_real_distribution<float> scale(0.125f, 1.0f);
    for (std::byte& b : bytes) b = static_cast<std::byte>(byte(random));
    for (int block = 0; block < n_blocks; ++block)
        for (const int at : format.halves) {
            const std::uint16_t half =
                float_to_half(byte(random) < 128 ? scale(random) : -scale(random));
            std::memcpy(&bytes[static_cast<std::size_t>(block * format.bytes + at)], &half,
                        sizeof half);
        }
    return bytes;
}

class Block {
public:
    explicit Block(const std::byte* bytes) : bytes_(bytes) {}

    // Returns value i of a block exactly.
    double value(WeightType type, int i) const {
        switch (type) {
            case WeightType::q4_0: return half(0) * (nibble(2 + i % 16, i / 16) - 8);
            case WeightType::q4_1: return half(0) * nibble(4 + i % 16, i / 16) + half(2);
            case WeightType::q5_0: return half(0) * (five_bits(6, 2, i) - 16);
            case WeightType::q5_1: return half(0) * five_bits(8, 4, i) + half(2);
            case WeightType::q8_0: return half(0) * static_cast<std::int8_t>(byte(2 + i));
            case WeightType::q4_k: return scaled(i, nibble(16 + i / 64 * 32 + i % 32, i / 32 % 2));
            case WeightType::q5_k:
                return scaled(i, nibble(48 + i / 64 * 32 + i % 32, i / 32 % 2) +
                                     (byte(16 + i % 32) >> i / 32 & 1) * 16);
            case WeightType::q6_k: return six_bits(i);
            case WeightType::tq1_0: return half(52) * (digit(i) - 1);
            case WeightType::tq2_0:
                return half(64) * ((byte(i / 128 * 32 + i % 32) >> i % 128 / 32 * 2 & 3) - 1);
            case WeightType::f16: return half(0);
        }
        return 0.0;
    }

private:
    int byte(int at) const { return std::to_integer<int>(bytes_[at]); }
    int nibble(int at, int which) const { return byte(at) >> 4 * which & 15; }
    double half(int at) const {
        std::uint16_t bits;
        std::memcpy(&bits, bytes_ + at, sizeof bits);
        return half_to_float(bits);
    }
    // Returns a code whose lower four bits begin at `low`, and whose upper bit is in the four bytes
    // from `upper` on.
    int five_bits(int low, int upper, int i) const {
        return nibble(low + i % 16, i / 16) + (byte(upper + i / 8) >> i % 8 & 1) * 16;
    }
    // Decodes Q4_K and Q5_K, which have 8 scales and 8 minima of 6 bits each.
    double scaled(int i, int code) const {
        const int group = i / 32;
        int scale = byte(4 + group % 4), minimum = byte(8 + group % 4);
        if (group < 4) {
            scale &= 63;
            minimum &= 63;
        } else {
            scale = (byte(8 + group) & 15) | scale >> 6 << 4;
            minimum = byte(8 + group) >> 4 | minimum >> 6 << 4;
        }
        return half(0) * scale * code - half(2) * minimum;
    }
    double six_bits(int i) const {
        const int within = i % 128;
        const int low = nibble(i / 128 * 64 + within % 64, within / 64);
        const int high = byte(128 + i / 128 * 32 + within % 32) >> within / 32 * 2 & 3;
        const int scale = static_cast<std::int8_t>(byte(192 + i / 16));
        return half(208) * scale * (low + 16 * high - 32);
    }
    // Decodes TQ1_0, whose digits are of base 3: five per byte in the first 48 bytes, four per byte
    // in the next 4.
    int digit(int i) const {
        int at = i % 32, place = i / 32;
        if (i >= 160) at = 32 + (i - 160) % 16, place = (i - 160) / 16;
        if (i >= 240) at = 48 + (i - 240) % 4, place = (i - 240) / 4;
        int shifted = byte(at);
        for (; place > 0; --place) shifted = shifted * 3 % 256;
        return shifted * 3 / 256;
    }

    const std::byte* bytes_;
};

}  // namespace entropykv
