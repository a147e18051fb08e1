// How the types of K and V lie in pages, in one table: of what units their rows are made, and how a
// row is read. Whatever copies, sizes or packs entries goes by these numbers, and asks for no type;
// only kernels are written for one (kernels/kernel_type.hpp).
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "page/page_layout.hpp"

namespace entropykv {

// Rows are made of units, which always move as a whole: as many neighbouring values as share one
// integer. Where values have scales, kQuantBlock of them share one.
struct PageCodec {
    KvType type;
    const char* name;  // as llama.cpp has it
    int k_unit_values, k_unit_bytes;
    int v_unit_values, v_unit_bytes;
    int v_together;  // entries whose units of V lie interleaved
    bool scaled;
    // The first n values of the K row of an entry, and all of its V row, of no latent layout.
    void (*load_k)(const PageLayout&, const std::byte* page, int slot, int n, float* out);
    void (*load_v)(const PageLayout&, const std::byte* page, int slot, float* out);
};

constexpr std::size_t kNumberOfKvTypes = static_cast<std::size_t>(KvType::q8_0) + 1;
extern const std::array<PageCodec, kNumberOfKvTypes> kPageCodecs;  // in the order of KvType

// The row of a type. Throws std::invalid_argument where there is none.
const PageCodec& codec_of(KvType type);

// The type of a name. Throws std::invalid_argument.
KvType kv_type_named(const std::string& name);
std::vector<std::string> kv_type_names();

}  // namespace entropykv
