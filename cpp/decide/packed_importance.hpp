// Packs the importance of an entry into 32 bits if a part of it is predicted: two numbers share the
// float that every entry has. The upper 20 bits are the upper bits of a float: what queries gave,
// which decays. The lower 12 bits are the share of attention that a later query is expected to
// give, which stays: the upper bits of a float from 2^-20 to 1, counted from those of 2^-20. Read
// as a float, all 32 bits are what queries gave, up to rounding, so the checks of importance apply
// to them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace entropykv {

class PackedImportance {
public:
    explicit PackedImportance(float packed) : bits_(bits_of(packed)) {}
    PackedImportance(float given, float share) : bits_(rounded(given) | code_of(share)) {}

    // Returns what queries gave, with 12 bits of precision.
    float given() const { return float_of(bits_ & ~kShareMask); }
    // Returns the largest share of its attention that a later query is expected to give, from 2^-20
    // to 1, with 8 bits of precision.
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
    static constexpr std::uint32_t kLeastShare = 0x35800000u;  // 2^-20 as a float
    static constexpr std::uint32_t kOne = 0x3f800000u;
    // This is the largest finite float whose lower bits are 0.
    static constexpr std::uint32_t kLargest = 0x7f7ff000u;

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
