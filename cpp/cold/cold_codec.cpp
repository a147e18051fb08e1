#include "cold/cold_codec.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "platform/half.hpp"

namespace entropykv {
namespace {

constexpr std::size_t kScaleBytes = sizeof(std::uint16_t);
// Rows that are kept as stored are aligned to this.
constexpr std::size_t kUnit = sizeof(std::uint32_t);

float put_scale(float scale, std::byte* block) {
    const std::uint16_t half = float_to_half(scale);
    std::memcpy(block, &half, sizeof half);
    const float kept = half_to_float(half);
    return kept > 0.0f || kept < 0.0f ? 1.0f / kept : 0.0f;
}

float get_scale(const std::byte* block) {
    std::uint16_t half;
    std::memcpy(&half, block, sizeof half);
    return half_to_float(half);
}

void pack_int8(const float* values, std::byte* block) {
    float limit = 0.0f;
    for (int i = 0; i < kQuantBlock; ++i) limit = std::max(limit, std::fabs(values[i]));
    const float inverse = put_scale(limit / 127.0f, block);
    for (int i = 0; i < kQuantBlock; ++i) {
        const float value = std::nearbyint(values[i] * inverse);
        block[kScaleBytes + static_cast<std::size_t>(i)] =
            static_cast<std::byte>(static_cast<std::int8_t>(std::clamp(value, -127.0f, 127.0f)));
    }
}

void unpack_int8(const std::byte* block, float* values) {
    const float scale = get_scale(block);
    for (int i = 0; i < kQuantBlock; ++i)
        values[i] = scale * static_cast<float>(static_cast<std::int8_t>(
                                block[kScaleBytes + static_cast<std::size_t>(i)]));
}

// Values i and i + 16 share a byte. The sign of the scale is chosen so that the largest value
// becomes -8.
void pack_int4(const float* values, std::byte* block) {
    float limit = 0.0f;
    for (int i = 0; i < kQuantBlock; ++i)
        if (std::fabs(values[i]) > std::fabs(limit)) limit = values[i];
    const float inverse = put_scale(limit / -8.0f, block);
    const auto code = [&](int i) {
        return static_cast<unsigned>(std::clamp(values[i] * inverse + 8.5f, 0.0f, 15.0f));
    };
    for (int i = 0; i < kQuantBlock / 2; ++i)
        block[kScaleBytes + static_cast<std::size_t>(i)] =
            static_cast<std::byte>(code(i) | code(i + kQuantBlock / 2) << 4);
}

void unpack_int4(const std::byte* block, float* values) {
    const float scale = get_scale(block);
    for (int i = 0; i < kQuantBlock / 2; ++i) {
        const auto codes = static_cast<int>(block[kScaleBytes + static_cast<std::size_t>(i)]);
        values[i] = scale * static_cast<float>((codes & 15) - 8);
        values[i + kQuantBlock / 2] = scale * static_cast<float>((codes >> 4) - 8);
    }
}

struct BlockCodec {
    std::size_t bytes;
    void (*pack)(const float* values, std::byte* block);
    void (*unpack)(const std::byte* block, float* values);
};

const BlockCodec& blocks_of(ColdType type) {
    static constexpr BlockCodec int8{kScaleBytes + kQuantBlock, pack_int8, unpack_int8};
    static constexpr BlockCodec int4{kScaleBytes + kQuantBlock / 2, pack_int4, unpack_int4};
    switch (type) {
        case ColdType::q8_0: return int8;
        case ColdType::q4_0: return int4;
        case ColdType::as_stored: break;
    }
    throw std::logic_error("entries as stored lie in no blocks");
}

std::size_t row_bytes(ColdType type, int dim) {
    return blocks_of(type).bytes * static_cast<std::size_t>((dim + kQuantBlock - 1) / kQuantBlock);
}

// Packs a row, which it pads with zeros to whole blocks, and returns the end of the packed row.
std::byte* pack_row(ColdType type, float* row, int dim, std::byte* packed) {
    const BlockCodec& blocks = blocks_of(type);
    const int end = (dim + kQuantBlock - 1) / kQuantBlock * kQuantBlock;
    std::fill(row + dim, row + end, 0.0f);
    for (int d = 0; d < end; d += kQuantBlock, packed += blocks.bytes) blocks.pack(row + d, packed);
    return packed;
}

const std::byte* unpack_row(ColdType type, const std::byte* packed, int dim, float* row) {
    const BlockCodec& blocks = blocks_of(type);
    for (int d = 0; d < dim; d += kQuantBlock, packed += blocks.bytes)
        blocks.unpack(packed, row + d);
    return packed;
}

// Copies units of K and V that lie `stride` units apart in a page: see PageCodec.
template <typename Type, std::size_t stride>
struct Units {
    static void gather(const std::byte* from, int n, std::byte* to) {
        const Type* source = reinterpret_cast<const Type*>(from);
        Type* target = reinterpret_cast<Type*>(to);
        for (int i = 0; i < n; ++i) target[i] = source[static_cast<std::size_t>(i) * stride];
    }
    // This loop takes most of the time of restoring entries, so it moves a few units at a time.
    static void scatter(const std::byte* from, int n, std::byte* to) {
        if (stride == 1) {
            std::memcpy(to, from, bytes(n));
            return;
        }
        constexpr int kAtOnce = 8;
        Type* target = reinterpret_cast<Type*>(to);
        Type values[kAtOnce];
        for (; n >= kAtOnce; n -= kAtOnce, from += sizeof values, target += kAtOnce * stride) {
            std::memcpy(values, from, sizeof values);
            for (std::size_t k = 0; k < kAtOnce; ++k) target[k * stride] = values[k];
        }
        std::memcpy(values, from, bytes(n));
        for (std::size_t k = 0; k < static_cast<std::size_t>(n); ++k)
            target[k * stride] = values[k];
    }
    static std::size_t bytes(int n) { return sizeof(Type) * static_cast<std::size_t>(n); }
};

template <typename Visit>
void visit_keys(const PageLayout& layout, int slot, Visit visit) {
    const std::size_t at = layout.k_at(slot);
    if (layout.k_unit_bytes == 2)
        return visit(Units<std::uint16_t, kGroupEntries>{}, at, layout.k_units);
    visit(Units<std::uint32_t, kGroupEntries>{}, at, layout.k_units);
}

// Calls visit() for the bytes of V, which lie 4 apart or one after the other.
template <typename Visit>
void visit_values(const PageLayout& layout, int slot, Visit visit) {
    const std::size_t at = layout.v_at(slot);
    if (layout.v_together == 4) return visit(Units<std::uint8_t, 4>{}, at, layout.v_units);
    visit(Units<std::uint8_t, 1>{}, at, layout.v_units * layout.v_unit_bytes);
}

// Calls visit(Units, place in the page, number of units) for all fields of an entry, in the order
// in which they are packed.
template <typename Visit>
void over_parts(const PageLayout& layout, int slot, Visit visit) {
    const auto scales = [&](std::size_t offset, int blocks) {
        visit(Units<std::uint16_t, kGroupEntries>{},
              offset + sizeof(std::uint16_t) * PageLayout::scale_index(blocks, slot, 0), blocks);
    };
    visit_keys(layout, slot, visit);
    if (!layout.latent) visit_values(layout, slot, visit);
    if (layout.k_blocks > 0) scales(layout.k_scale_offset, layout.k_blocks);
    if (layout.v_blocks > 0) scales(layout.v_scale_offset, layout.v_blocks);
}

}  // namespace

ColdCodec::ColdCodec(ColdType type, const PageLayout& layout)
    : type_(type), layout_(layout), entry_bytes_(0) {
    if (type == ColdType::as_stored) {
        over_parts(layout, 0,
                   [&](auto units, std::size_t, int n) { entry_bytes_ += units.bytes(n); });
        entry_bytes_ = (entry_bytes_ + kUnit - 1) / kUnit * kUnit;
    } else {
        entry_bytes_ =
            row_bytes(type, layout.k_dim) + (layout.latent ? 0 : row_bytes(type, layout.v_dim));
    }
    bytes_ = entry_bytes_ * PageLayout::index(layout.entries);
}

void ColdCodec::pack(const std::byte* page, std::byte* packed) const noexcept {
    float row[kMaxHeadDim + kQuantBlock];
    for (int slot = 0; slot < layout_.entries; ++slot, packed += entry_bytes_) {
        std::byte* next = packed;
        if (as_stored()) {
            over_parts(layout_, slot, [&](auto units, std::size_t at, int n) {
                units.gather(page + at, n, next);
                next += units.bytes(n);
            });
            continue;
        }
        load_k(layout_, page, slot, row);
        next = pack_row(type_, row, layout_.k_dim, next);
        if (layout_.latent) continue;
        load_v(layout_, page, slot, row);
        pack_row(type_, row, layout_.v_dim, next);
    }
}

void ColdCodec::unpack(const std::byte* packed, int entry, const KernelTable& kernels,
                       std::byte* page, int slot) const noexcept {
    packed = rows(packed, entry);
    if (as_stored()) {
        over_parts(layout_, slot, [&](auto units, std::size_t at, int n) {
            units.scatter(packed, n, page + at);
            packed += units.bytes(n);
        });
        return;
    }
    float row[kMaxHeadDim + kQuantBlock];
    packed = unpack_row(type_, packed, layout_.k_dim, row);
    kernels.store_k(layout_, page, slot, row);
    if (layout_.latent) return;
    unpack_row(type_, packed, layout_.v_dim, row);
    kernels.store_v(layout_, page, slot, row);
}

void ColdCodec::unpack(const std::byte* packed, const KernelTable& kernels,
                       std::byte* page) const noexcept {
    for (int slot = 0; slot < layout_.entries; ++slot) unpack(packed, slot, kernels, page, slot);
}

}  // namespace entropykv
