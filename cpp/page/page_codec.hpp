// Describes in one table how each KV type lies in pages: what units its rows consist of, and how a
// row is read. Code that copies, sizes or packs entries uses this table instead of the type; only
// kernels are written for one type (kernels/kernel_tile.hpp).
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "page/page_layout.hpp"

namespace entropykv {

// A row consists of units: a value, or values that share an integer. A unit always moves as a
// whole. If values have scales, kQuantBlock values share a scale.
struct PageCodec {
    KvType type;
    const char* name;  // llama.cpp's name; with a / if K and V have different types
    int k_unit_values, k_unit_bytes;
    int v_unit_values, v_unit_bytes;
    int v_together;  // entries whose units of V are interleaved
    int v_padding;   // rows of V are padded to a multiple of this
    bool scaled;
    bool rotated;  // blocks of V are rotated: see value_rotation.hpp
    // Load the first n values of the K row of an entry, and its whole V row (not for latent
    // layouts).
    void (*load_k)(const PageLayout&, const std::byte* page, int slot, int n, float* out);
    void (*load_v)(const PageLayout&, const std::byte* page, int slot, float* out);
};

constexpr std::size_t kNumberOfKvTypes = static_cast<std::size_t>(KvType::q8_0_iq4_nl) + 1;
// The table has its rows in the order of KvType.
extern const std::array<PageCodec, kNumberOfKvTypes> kPageCodecs;

// Returns the row of a type. Throws std::invalid_argument if there is none.
const PageCodec& codec_of(KvType type);

// Returns the type with a name. Throws std::invalid_argument if there is none.
KvType kv_type_named(const std::string& name);
std::vector<std::string> kv_type_names();

}  // namespace entropykv
