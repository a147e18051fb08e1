#include "cold/cold_codec.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "platform/half.hpp"

namespace entropykv {
namespace {

constexpr std::size_t kScaleBytes = sizeof(std::uint16_t);
constexpr std::size_t kUnit = sizeof(std::uint32_t);  // entries as stored begin at multiples of it

std::size_t block_bytes(ColdType type) {
    return kScaleBytes +
           static_cast<std::size_t>(type == ColdType::q8_0 ? kQuantBlock : kQuantBlock / 2);
}

std::size_t row_bytes(ColdType type, int dim) {
    return block_bytes(type) * static_cast<std::size_t>((dim + kQuantBlock - 1) / kQuantBlock);
}

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

// Values i and i + 16 share a byte. The scale has the sign that puts the largest value at -8.
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

// Rows end with zeros up to whole blocks.
std::byte* pack_row(ColdType type, float* row, int dim, std::byte* packed) {
    const int end = (dim + kQuantBlock - 1) / kQuantBlock * kQuantBlock;
    std::fill(row + dim, row + end, 0.0f);
    for (int d = 0; d < end; d += kQuantBlock, packed += block_bytes(type))
        type == ColdType::q8_0 ? pack_int8(row + d, packed) : pack_int4(row + d, packed);
    return packed;
}

const std::byte* unpack_row(ColdType type, const std::byte* packed, int dim, float* row) {
    for (int d = 0; d < dim; d += kQuantBlock, packed += block_bytes(type))
        type == ColdType::q8_0 ? unpack_int8(packed, row + d) : unpack_int4(packed, row + d);
    return packed;
}

// Units of K and V as they lie in a page, so many units apart: one value of f16, or of q8_0 as many
// as lie together.
template <typename Type, std::size_t stride>
struct Units {
    static void gather(const std::byte* from, int n, std::byte* to) {
        const Type* source = reinterpret_cast<const Type*>(from);
        Type* target = reinterpret_cast<Type*>(to);
        for (int i = 0; i < n; ++i) target[i] = source[static_cast<std::size_t>(i) * stride];
    }
    // A few at a time: to restore entries is mostly this.
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

// Calls visit(Units, place in the page, number of units) for the parts of an entry, in the order in
// which they are packed.
template <typename Visit>
void over_parts(const PageLayout& layout, int slot, Visit visit) {
    const auto bytes = [&](std::size_t values) { return values * layout.value_bytes(); };
    const auto scales = [&](std::size_t offset, int blocks) {
        visit(Units<std::uint16_t, kGroupEntries>{},
              offset + sizeof(std::uint16_t) * PageLayout::scale_index(blocks, slot, 0), blocks);
    };
    const std::size_t k = layout.k_offset + bytes(layout.k_index(slot, 0));
    const std::size_t v = layout.latent ? 0 : layout.v_offset + bytes(layout.v_index(slot, 0));
    if (layout.type == KvType::f16) {
        visit(Units<std::uint16_t, kGroupEntries>{}, k, layout.k_stride);
        if (!layout.latent) visit(Units<std::uint16_t, 1>{}, v, layout.v_stride);
        return;
    }
    visit(Units<std::uint32_t, kGroupEntries>{}, k, layout.k_stride / 4);
    if (!layout.latent) visit(Units<std::uint8_t, 4>{}, v, layout.v_stride);
    scales(layout.k_scale_offset, layout.k_blocks);
    if (!layout.latent) scales(layout.v_scale_offset, layout.v_blocks);
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
