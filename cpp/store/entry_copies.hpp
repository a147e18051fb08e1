// Copies K and V of entries between pages of one layer. The keys of a group of entries are
// interleaved, so moving one of them takes as long as moving all of them. Therefore copies from one
// group to another are collected and made together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.hpp"

namespace entropykv {

// The source pages must not change before flush(), which the destructor calls.
class EntryCopies {
public:
    EntryCopies(const PageLayout& layout, const KernelTable& kernels)
        : layout_(&layout), kernels_(&kernels) {}
    ~EntryCopies() { flush(); }
    EntryCopies(const EntryCopies&) = delete;
    EntryCopies& operator=(const EntryCopies&) = delete;

    // V is copied at once, K at the next flush().
    void add(const std::byte* from, int from_slot, std::byte* to, int to_slot) noexcept {
        copy_value(*layout_, from, from_slot, to, to_slot);
        const unsigned from_group = static_cast<unsigned>(from_slot) / kGroupEntries;
        const unsigned to_group = static_cast<unsigned>(to_slot) / kGroupEntries;
        if (from != from_ || from_group != from_group_ || to != to_ || to_group != to_group_) {
            flush();
            from_ = from;
            from_group_ = from_group;
            to_ = to;
            to_group_ = to_group;
        }
        moves_.from[moves_.n] = lane(from_slot);
        moves_.to[moves_.n++] = lane(to_slot);
    }

    void flush() noexcept {
        if (moves_.n > 0)
            kernels_->move_keys(*layout_, from_, static_cast<int>(from_group_), to_,
                                static_cast<int>(to_group_), moves_);
        moves_.n = 0;
    }

private:
    static std::uint8_t lane(int slot) {
        return static_cast<std::uint8_t>(static_cast<unsigned>(slot) % kGroupEntries);
    }

    const PageLayout* layout_;
    const KernelTable* kernels_;
    const std::byte* from_ = nullptr;
    std::byte* to_ = nullptr;
    unsigned from_group_ = 0;
    unsigned to_group_ = 0;
    LaneMoves moves_{};
};

}  // namespace entropykv
