// How a page of frozen entries is held: as the store has it, bit by bit, or with narrower rows. A
// narrower page is the K and V rows of its entries one after the other, in ggml's blocks of 32
// values (q8_0: scale and 32 bytes; q4_0: scale and 32 values of 4 bits).
#pragma once

#include <cstddef>

#include "freezing.hpp"
#include "kernels.hpp"
#include "page_layout.hpp"

namespace entropykv {

class ColdCodec {
public:
    ColdCodec(ColdType type, const PageLayout& layout);

    std::size_t bytes() const { return bytes_; }
    bool as_stored() const { return type_ == ColdType::as_stored; }
    // Both in full pages; positions and importance go along only as stored.
    void pack(const std::byte* page, std::byte* packed) const noexcept;
    void unpack(const std::byte* packed, const KernelTable& kernels,
                std::byte* page) const noexcept;

private:
    ColdType type_;
    PageLayout layout_;
    std::size_t bytes_;
};

}  // namespace entropykv
