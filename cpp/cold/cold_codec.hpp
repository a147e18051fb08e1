// How a page of frozen entries is held: the K and V rows of one entry after the other, so that a
// single one is read without the others. As the store has them, bit by bit: K, V, the scales of K,
// those of V. Or narrower, in ggml's blocks of 32 values (q8_0: scale and 32 bytes; q4_0: scale and
// 32 values of 4 bits).
#pragma once

#include <cstddef>

#include "decide/freezing.hpp"
#include "kernels/kernels.hpp"
#include "page/page_layout.hpp"

namespace entropykv {

class ColdCodec {
public:
    ColdCodec(ColdType type, const PageLayout& layout);

    std::size_t bytes() const { return bytes_; }
    bool as_stored() const { return type_ == ColdType::as_stored; }
    // All entries of a page.
    void pack(const std::byte* page, std::byte* packed) const noexcept;
    void unpack(const std::byte* packed, const KernelTable& kernels,
                std::byte* page) const noexcept;
    // One of them, to a slot of a page.
    void unpack(const std::byte* packed, int entry, const KernelTable& kernels, std::byte* page,
                int slot) const noexcept;
    // Where an entry begins, and how much it is.
    const std::byte* rows(const std::byte* packed, int entry) const {
        return packed + static_cast<std::size_t>(entry) * entry_bytes_;
    }
    std::size_t entry_bytes() const { return entry_bytes_; }

private:
    ColdType type_;
    PageLayout layout_;
    std::size_t entry_bytes_;
    std::size_t bytes_;
};

}  // namespace entropykv
