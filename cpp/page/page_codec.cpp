#include "page/page_codec.hpp"

#include <algorithm>
#include <stdexcept>

#include "page/value_rotation.hpp"
#include "platform/half.hpp"

namespace entropykv {
namespace {

void load_half_k(const PageLayout& layout, const std::byte* page, int slot, int n, float* out) {
    const auto* k = reinterpret_cast<const std::uint16_t*>(page + layout.k_at(slot));
    for (int d = 0; d < n; ++d) out[d] = half_to_float(k[d * kGroupEntries]);
}

void load_half_v(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    const auto* v = reinterpret_cast<const std::uint16_t*>(page + layout.v_at(slot));
    for (int d = 0; d < layout.v_dim; ++d) out[d] = half_to_float(v[d]);
}

void load_int8_k(const PageLayout& layout, const std::byte* page, int slot, int n, float* out) {
    const auto* k = reinterpret_cast<const std::uint8_t*>(page + layout.k_at(slot));
    const auto* scales = reinterpret_cast<const std::uint16_t*>(page + layout.k_scale_offset);
    float scale = 0.0f;
    for (int d = 0; d < n; ++d) {
        if (d % kQuantBlock == 0)
            scale = half_to_float(
                scales[PageLayout::scale_index(layout.k_blocks, slot, d / kQuantBlock)]);
        const int byte = k[d / 4 * 4 * kGroupEntries + quad_place(d)] - 0x80;
        out[d] = static_cast<float>(byte) * scale;
    }
}

void load_int8_v(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    const auto* v = reinterpret_cast<const std::int8_t*>(page + layout.v_at(slot));
    const auto* scales = reinterpret_cast<const std::uint16_t*>(page + layout.v_scale_offset);
    for (int d = 0; d < layout.v_dim; ++d) {
        const auto scale = scales[PageLayout::scale_index(layout.v_blocks, slot, d / kQuantBlock)];
        out[d] = static_cast<float>(v[d * 4]) * half_to_float(scale);
    }
}

void load_int4_v(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    const auto* v = reinterpret_cast<const std::uint8_t*>(page + layout.v_at(slot));
    const auto* scales = reinterpret_cast<const std::uint16_t*>(page + layout.v_scale_offset);
    for (int block = 0; block < layout.v_blocks; ++block, v += kQuantBlock / 2 * 4) {
        const float scale =
            half_to_float(scales[PageLayout::scale_index(layout.v_blocks, slot, block)]);
        float values[kQuantBlock];
        for (int d = 0; d < kQuantBlock; ++d) {
            const int codes = v[d % (kQuantBlock / 2) * 4];
            const int code = d < kQuantBlock / 2 ? codes & 15 : codes >> 4;
            values[d] = static_cast<float>(kValueLevels[code]) * scale;
        }
        rotate_block(values);
        const int first = block * kQuantBlock;
        std::copy_n(values, std::min(kQuantBlock, layout.v_dim - first), out + first);
    }
}

}  // namespace

constexpr std::array<PageCodec, kNumberOfKvTypes> kPageCodecs{{
    {KvType::f16, "f16", 1, 2, 1, 2, 1, 16, false, false, load_half_k, load_half_v},
    {KvType::q8_0, "q8_0", 4, 4, 1, 1, 4, 16, true, false, load_int8_k, load_int8_v},
    {KvType::q8_0_iq4_nl, "q8_0/iq4_nl", 4, 4, 2, 1, 4, kQuantBlock, true, true, load_int8_k,
     load_int4_v},
}};

constexpr bool all_have_a_codec() {
    for (std::size_t row = 0; row < kPageCodecs.size(); ++row)
        if (kPageCodecs[row].name == nullptr || kPageCodecs[row].type != static_cast<KvType>(row))
            return false;
    return true;
}
static_assert(all_have_a_codec(), "rows of kPageCodecs must be in the order of KvType");

// Checks that all units have a size that the code that copies and packs entries can handle.
constexpr bool units_are_known() {
    for (const PageCodec& codec : kPageCodecs) {
        const bool k = codec.k_unit_bytes == 2 || codec.k_unit_bytes == 4;
        const bool v = codec.v_together == 1 || (codec.v_together == 4 && codec.v_unit_bytes == 1);
        if (!k || !v) return false;
    }
    return true;
}
static_assert(units_are_known(), "units of K have 2 or 4 bytes; those of V lie in rows, or by 4");

const PageCodec& codec_of(KvType type) {
    const auto row = static_cast<std::size_t>(type);
    if (row >= kPageCodecs.size())
        throw std::invalid_argument("a type of K and V that does not exist");
    return kPageCodecs[row];
}

KvType kv_type_named(const std::string& name) {
    std::string known;
    for (const PageCodec& codec : kPageCodecs) {
        if (name == codec.name) return codec.type;
        known += (known.empty() ? "" : " or ") + std::string(codec.name);
    }
    throw std::invalid_argument("kv_type must be " + known + ", not " + name);
}

std::vector<std::string> kv_type_names() {
    std::vector<std::string> names;
    for (const PageCodec& codec : kPageCodecs) names.emplace_back(codec.name);
    return names;
}

}  // namespace entropykv
