// How a page holds a fixed number of entries of one layer: K rows, V rows, positions, importance.
#pragma once

#include <cstddef>
#include <cstdint>

namespace entropykv {

enum class KvType { f16, q8_0 };  // what they are: page_codec.hpp

constexpr int kMaxHeadDim = 1024;
constexpr int kQuantBlock = 32;  // values that share one scale in q8_0

// Entries of a page that lie side by side. One vector of AVX-512 holds a value of each.
constexpr int kGroupEntries = 16;

// The order of four values in the four bytes of q8_0: the even bytes are the first two, the odd
// bytes the last two, so that either half widens to pairs of neighbours.
constexpr int quad_place(int i) { return i % 2 * 2 + i % 4 / 2; }

// Offsets in bytes from the start of a page. Rows are padded with zeros to 16 values, and every
// array to whole groups, so that no kernel has a tail.
//
//            f16                             q8_0
// K          [group][k_stride][16 entries]   [group][k_stride / 4][16 entries][4 values]
// V          [entry][v_stride]               [entry / 4][v_stride][4 entries]
// scales                                     [group][block][16 entries], f16
//
// Where V is the first values of K (multi-head latent attention), no V is held: it lies as K does.
//
// K lies across the entries, so that q.k of 16 entries is one vector and needs no sum over lanes; V
// lies along them, since p.v sums over entries. In q8_0 both are interleaved by 4 for products of
// pairs of integers; bytes of K have their sign bit flipped (value + 128), those of V are signed.
struct PageLayout {
    KvType type;
    int entries;
    int k_dim, v_dim;
    int k_stride, v_stride;  // values of a row, padded
    int k_blocks, v_blocks;  // scales of a row
    // Units of a row, see PageCodec, and their bytes; V of so many entries lies interleaved.
    int k_units, v_units;
    int k_unit_bytes, v_unit_bytes;
    int v_together;
    std::size_t k_offset, k_scale_offset, v_offset, v_scale_offset;
    std::size_t position_offset, importance_offset;
    std::size_t bytes;
    bool latent;  // V is the first v_dim values of K

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    // Of one group.
    std::size_t k_group_bytes() const { return index(k_unit_bytes * k_units * kGroupEntries); }
    std::size_t v_group_bytes() const { return index(v_unit_bytes * v_units * kGroupEntries); }

    // Of the keys of all entries of a page.
    std::size_t k_bytes() const { return k_group_bytes() * index(entries / kGroupEntries); }

    // The page of a list that holds entry i, and its slot there. (Most pages are one group; to
    // divide by anything else takes ten times as long.)
    int page_of(int i) const { return entries == kGroupEntries ? i / kGroupEntries : i / entries; }
    int slot_of(int i) const { return i - page_of(i) * entries; }

    // Where the rows of an entry begin in a page, in bytes; units of K lie
    // kGroupEntries of them apart, those of V v_together.
    std::size_t k_at(int slot) const {
        const int group = slot / kGroupEntries;
        const int lane = slot % kGroupEntries;
        return k_offset + index(group) * k_group_bytes() + index(lane * k_unit_bytes);
    }
    std::size_t v_at(int slot) const {  // of no latent layout
        const int first = slot / v_together * v_together;
        const int place = v_together == 4 ? quad_place(slot) : 0;
        return v_offset + index((first * v_units + place) * v_unit_bytes);
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

// Layout of a page of `entries` entries with rows of k_dim and v_dim values.
PageLayout make_page_layout(KvType type, int k_dim, int v_dim, int entries, bool latent = false);

// Copies one entry with everything that belongs to it; both pages have the same layout.
void copy_entry(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot);
// K and V of it.
void copy_rows(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
               int to_slot);
// V of it, and the scales of both rows.
void copy_value(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot);
// What is known of it: position and importance.
void copy_marks(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot);

// Entries of a group that take the places of others: from[i] goes to to[i].
struct LaneMoves {
    int n = 0;
    std::uint8_t from[kGroupEntries];
    std::uint8_t to[kGroupEntries];
};

// The K row of an entry, k_dim values, and its V row, v_dim values.
void load_k(const PageLayout& layout, const std::byte* page, int slot, float* out);
void load_v(const PageLayout& layout, const std::byte* page, int slot, float* out);

}  // namespace entropykv
