// Defines how a page holds a fixed number of entries of one layer: K rows, V rows, positions,
// importance.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decide/key_centre.hpp"

namespace entropykv {

// Described in page_codec.hpp. The values of q8_0_iq4_nl have 4 bits, its keys are those of q8_0.
enum class KvType { f16, q8_0, q8_0_iq4_nl };

constexpr int kMaxHeadDim = 1024;
constexpr int kQuantBlock = 32;  // values that share a scale in q8_0 and iq4_nl

// Entries are interleaved in groups of this size, so that one AVX-512 vector holds one value of
// each.
constexpr int kGroupEntries = 16;

// The levels of a value in iq4_nl, as ggml has them: denser where there are more values.
constexpr int kLevels = 16;
constexpr std::int8_t kValueLevels[kLevels] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};

// Returns where value i of four goes in the four bytes of a q8_0 unit: the even bytes hold the
// first two values, the odd bytes the last two, so that either half widens to pairs of neighbours.
constexpr int quad_place(int i) { return i % 2 * 2 + i % 4 / 2; }

// Holds the offsets in bytes from the start of a page. Rows are padded with zeros to 16 values,
// those of iq4_nl to whole blocks, and every array to whole groups, so that kernels need not handle
// a remainder.
//
//            f16                             q8_0
// K          [group][k_stride][16 entries]   [group][k_stride / 4][16 entries][4 values]
// V          [entry][v_stride]               [entry / 4][v_stride][4 entries]
// scales                                     [group][block][16 entries], f16
//
// V in iq4_nl is [entry / 4][block][16 bytes][4 entries]. Byte i of a block holds its values i (the
// low 4 bits) and i + 16, each as a place in kValueLevels. A block is rotated before it is rounded:
// see value_rotation.hpp.
//
// If V is the first values of K (multi-head latent attention), V is not stored: it is read from K.
//
// If K and V lie elsewhere, such as in rows on a device, an entry has the number of its row there
// in the place of K, and the squared norm of its value in the place of V. That is enough to decide
// which entries stay.
//
// The K of a group of entries is interleaved, so that q.k of 16 entries is one vector and needs no
// sum over lanes. V is stored entry by entry, since p.v sums over entries. In q8_0 both are
// interleaved by 4 for products of pairs of integers; bytes of K have their sign bit flipped
// (value + 128), those of V are signed.
struct PageLayout {
    KvType type;
    int entries;
    int k_dim, v_dim;
    int k_stride, v_stride;  // values of a row, padded
    int k_blocks, v_blocks;  // scales of a row
    // Units of a row and their bytes (see PageCodec), and how many entries of V are interleaved.
    int k_units, v_units;
    int k_unit_bytes, v_unit_bytes;
    int v_together;
    std::size_t k_offset, k_scale_offset, v_offset, v_scale_offset;
    std::size_t position_offset, importance_offset;
    std::size_t bytes;
    bool latent;     // V is the first v_dim values of K
    bool rotated;    // V is stored rotated, so outputs of attention are rotated, too
    bool elsewhere;  // K and V are not in the page; no kernel may read them
    // Says how the keys of a KV head are stored; null: as they are. Only store_k() and load_k()
    // know it, all other functions and kernels work on what is stored.
    const KeyCentre* key_centre;

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    std::size_t k_group_bytes() const { return index(k_unit_bytes * k_units * kGroupEntries); }
    std::size_t v_group_bytes() const { return index(v_unit_bytes * v_units * kGroupEntries); }

    std::size_t k_bytes() const { return k_group_bytes() * index(entries / kGroupEntries); }

    // Return in which page of a list entry i lies, and in which slot. Most pages are one group;
    // dividing by a number that the compiler does not know takes ten times as long.
    int page_of(int i) const { return entries == kGroupEntries ? i / kGroupEntries : i / entries; }
    int slot_of(int i) const { return i - page_of(i) * entries; }

    // Return where the rows of an entry begin in a page, in bytes. The units of K are kGroupEntries
    // units apart, those of V v_together units.
    std::size_t k_at(int slot) const {
        const int group = slot / kGroupEntries;
        const int lane = slot % kGroupEntries;
        return k_offset + index(group) * k_group_bytes() + index(lane * k_unit_bytes);
    }
    std::size_t v_at(int slot) const {  // Latent layouts have no V.
        const int first = slot / v_together * v_together;
        const int place = v_together == 4 ? quad_place(slot) : 0;
        return v_offset + index((first * v_units + place) * v_unit_bytes);
    }
    // Return the number of an entry's row, and the squared norm of its value, of a layout whose K
    // and V lie elsewhere.
    std::int32_t& row(std::byte* page, int slot) const { return rows(page)[slot]; }
    std::int32_t* rows(std::byte* page) const {
        return reinterpret_cast<std::int32_t*>(page + k_offset);
    }
    float& value_square(std::byte* page, int slot) const { return value_squares(page)[slot]; }
    float* value_squares(std::byte* page) const {
        return reinterpret_cast<float*>(page + v_offset);
    }
    static std::size_t scale_index(int blocks, int slot, int block) {
        return index((slot / kGroupEntries * blocks + block) * kGroupEntries +
                     slot % kGroupEntries);
    }

    std::int32_t* positions(std::byte* page) const {
        return reinterpret_cast<std::int32_t*>(page + position_offset);
    }
    const std::int32_t* positions(const std::byte* page) const {
        return reinterpret_cast<const std::int32_t*>(page + position_offset);
    }
    float* importance(std::byte* page) const {
        return reinterpret_cast<float*>(page + importance_offset);
    }
    const float* importance(const std::byte* page) const {
        return reinterpret_cast<const float*>(page + importance_offset);
    }
};

// Returns the layout of a page of `entries` entries with rows of k_dim and v_dim values.
PageLayout make_page_layout(KvType type, int k_dim, int v_dim, int entries, bool latent = false);
// Returns the layout of a page of entries whose K and V lie elsewhere.
PageLayout make_reference_layout(int entries);

// Copies one entry with everything that belongs to it; both pages have the same layout.
void copy_entry(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot);
// Copies K and V of an entry, and their scales.
void copy_rows(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
               int to_slot);
// Copies V of an entry, and the scales of its K and V rows.
void copy_value(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot);
inline void copy_reference(const PageLayout& layout, const std::byte* from, int from_slot,
                           std::byte* to, int to_slot) {
    std::byte* source = const_cast<std::byte*>(from);  // is only read
    layout.row(to, to_slot) = layout.row(source, from_slot);
    layout.value_square(to, to_slot) = layout.value_square(source, from_slot);
}
inline void copy_metadata(const PageLayout& layout, const std::byte* from, int from_slot,
                          std::byte* to, int to_slot) {
    layout.positions(to)[to_slot] = layout.positions(from)[from_slot];
    layout.importance(to)[to_slot] = layout.importance(from)[from_slot];
}

// Lists entries of a group that replace others: from[i] goes to to[i].
struct LaneMoves {
    int n = 0;
    std::uint8_t from[kGroupEntries];
    std::uint8_t to[kGroupEntries];
};

// Load the K row (k_dim values) or the V row (v_dim values) of an entry.
void load_k(const PageLayout& layout, const std::byte* page, int slot, float* out);
void load_v(const PageLayout& layout, const std::byte* page, int slot, float* out);

}  // namespace entropykv
