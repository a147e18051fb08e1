#include "cold_codec.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.hpp"
#include "head_store.hpp"

namespace entropykv {
namespace {

constexpr std::size_t kScaleBytes = sizeof(std::uint16_t);

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

}  // namespace

ColdCodec::ColdCodec(ColdType type, const PageLayout& layout)
    : type_(type), layout_(layout), bytes_(layout.bytes) {
    if (type == ColdType::as_stored) return;
    bytes_ = static_cast<std::size_t>(layout.entries) *
             (row_bytes(type, layout.k_dim) + (layout.latent ? 0 : row_bytes(type, layout.v_dim)));
}

void ColdCodec::pack(const std::byte* page, std::byte* packed) const noexcept {
    if (as_stored()) {
        std::memcpy(packed, page, bytes_);
        return;
    }
    float row[kMaxHeadDim + kQuantBlock];
    for (int slot = 0; slot < layout_.entries; ++slot) {
        load_k(layout_, page, slot, row);
        packed = pack_row(type_, row, layout_.k_dim, packed);
        if (layout_.latent) continue;
        load_v(layout_, page, slot, row);
        packed = pack_row(type_, row, layout_.v_dim, packed);
    }
}

void ColdCodec::unpack(const std::byte* packed, const KernelTable& kernels,
                       std::byte* page) const noexcept {
    if (as_stored()) {
        std::memcpy(page, packed, bytes_);
        return;
    }
    float row[kMaxHeadDim + kQuantBlock];
    for (int slot = 0; slot < layout_.entries; ++slot) {
        packed = unpack_row(type_, packed, layout_.k_dim, row);
        kernels.store_k(layout_, page, slot, row);
        if (layout_.latent) continue;
        packed = unpack_row(type_, packed, layout_.v_dim, row);
        kernels.store_v(layout_, page, slot, row);
    }
}

}  // namespace entropykv
