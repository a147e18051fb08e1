// Encodes a page of frozen entries. The K and V rows of an entry are neighbours, so that it can be
// read without other entries. Entries are kept either bit for bit as the store has them (K, V, the
// scales of K, those of V), or narrower in ggml's blocks of 32 values (q8_0: a scale and 32 bytes;
// q4_0: a scale and 32 values of 4 bits).
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
    // Pack or unpack all entries of a page; `packed` has bytes() bytes.
    void pack(const std::byte* page, std::byte* packed) const noexcept;
    void unpack(const std::byte* packed, const KernelTable& kernels,
                std::byte* page) const noexcept;
    // Unpacks one packed entry to a slot of a page.
    void unpack(const std::byte* packed, int entry, const KernelTable& kernels, std::byte* page,
                int slot) const noexcept;
    // Return where a packed entry begins, and how many bytes it has.
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
