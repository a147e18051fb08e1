// Maps 64-bit keys to 32-bit numbers. It is fast, because a grammar uses it for every character.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace entropykv {

class NumberMap {
public:
    // Returns where the number of a key is stored, which is kNone for a new key. The reference is
    // valid until the next call.
    std::uint32_t& at(std::uint64_t key) {
        if (2 * (n_ + 1) > slots_.size()) grow();
        Slot& slot = find(key);
        if (slot.key == kFree) {
            slot.key = key;
            n_++;
        }
        return slot.number;
    }

    std::size_t size() const { return n_; }
    void clear() {
        slots_.clear();
        slots_.shrink_to_fit();
        n_ = 0;
    }

    static constexpr std::uint32_t kNone = UINT32_MAX;

private:
    static constexpr std::uint64_t kFree = UINT64_MAX;

    struct Slot {
        std::uint64_t key = kFree;
        std::uint32_t number = kNone;
    };

    Slot& find(std::uint64_t key) {
        const std::size_t mask = slots_.size() - 1;
        // The highest bits of the product depend on all bits of the key.
        auto at = static_cast<std::size_t>((key * 0x9E3779B97F4A7C15U) >> shift_);
        while (slots_[at].key != key && slots_[at].key != kFree) at = (at + 1) & mask;
        return slots_[at];
    }

    void grow() {
        std::vector<Slot> old(slots_.empty() ? 64 : 2 * slots_.size());
        old.swap(slots_);
        shift_ = old.empty() ? 58 : shift_ - 1;
        for (const Slot& slot : old)
            if (slot.key != kFree) find(slot.key) = slot;
    }

    std::vector<Slot> slots_;  // their number is a power of two
    int shift_ = 64;           // leaves as many bits as are needed to number the slots
    std::size_t n_ = 0;
};

}  // namespace entropykv
