// The importance of an entry where its key and value predict a part of it: two numbers in the 32
// bits of the float that every entry has. The upper 20 bits are those of a float: what queries
// gave, which decays. The lower 12 are the share of attention that a later query is expected to
// give, which stays: the upper bits of a float from 2^-20 to 1, counted from the lowest of them. As
// a float, the 32 bits are what queries gave, up to rounding, so that the checks of importance
// hold.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace entropykv {

class PackedImportance {
public:
    explicit PackedImportance(float packed) : bits_(bits_of(packed)) {}
    PackedImportance(float given, float share) : bits_(rounded(given) | code_of(share)) {}

    // What queries gave, 12 bits precise.
    float given() const { return float_of(bits_ & ~kShareMask); }
    // The largest share of its attention that a later query is expected to give, from 2^-20 to 1,
    // 8 bits precise.
    float share() const { return float_of(kLeastShare + ((bits_ & kShareMask) << kShareShift)); }
    PackedImportance with_given(float given) const {
        return PackedImportance(rounded(given) | (bits_ & kShareMask));
    }
    PackedImportance with_larger_share(float share) const {
        return PackedImportance((bits_ & ~kShareMask) |
                                std::max(bits_ & kShareMask, code_of(share)));
    }
    float packed() const { return float_of(bits_); }

private:
    static constexpr std::uint32_t kShareMask = 0xfffu;
    static constexpr std::uint32_t kShareShift = 16;
    static constexpr std::uint32_t kLeastShare = 0x35800000u;  // 2^-20
    static constexpr std::uint32_t kOne = 0x3f800000u;
    static constexpr std::uint32_t kLargest = 0x7f7ff000u;  // finite, with the lower bits 0

    explicit PackedImportance(std::uint32_t bits) : bits_(bits) {}
    static std::uint32_t bits_of(float value) {
        std::uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    }
    static float float_of(std::uint32_t bits) {
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    static std::uint32_t rounded(float given) {
        if (!(given > 0.0f)) return 0;
        return std::min((bits_of(given) + (kShareMask >> 1) + 1) & ~kShareMask, kLargest);
    }
    static std::uint32_t code_of(float share) {
        if (!(share > float_of(kLeastShare))) return 0;
        const std::uint32_t bits = std::min(bits_of(share), kOne);
        return (bits - kLeastShare + (1u << (kShareShift - 1))) >> kShareShift;
    }

    std::uint32_t bits_;
};

}  // namespace entropykv
