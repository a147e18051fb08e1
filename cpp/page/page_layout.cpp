#include "page/page_layout.hpp"

#include <cstring>

#include "page/page_codec.hpp"

namespace entropykv {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

int padded(int dim, int to) { return (dim + to - 1) / to * to; }

int whole_groups(int entries) {
    return (entries + kGroupEntries - 1) / kGroupEntries * kGroupEntries;
}

// Copies n units of `bytes` bytes that lie `apart` units from each other.
template <typename Unit>
void copy_strided(const std::byte* from, std::byte* to, int n, std::size_t apart) {
    const Unit* source = reinterpret_cast<const Unit*>(from);
    Unit* target = reinterpret_cast<Unit*>(to);
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i)
        target[i * apart] = source[i * apart];
}

void copy_units(int unit_bytes, const std::byte* from, std::byte* to, int n, int apart) {
    const std::size_t step = PageLayout::index(apart);
    if (apart == 1) {
        std::memcpy(to, from, PageLayout::index(unit_bytes * n));
        return;
    }
    switch (unit_bytes) {
        case 1: return copy_strided<std::uint8_t>(from, to, n, step);
        case 2: return copy_strided<std::uint16_t>(from, to, n, step);
        case 4: return copy_strided<std::uint32_t>(from, to, n, step);
    }
}

void copy_keys(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
               int to_slot) {
    copy_units(layout.k_unit_bytes, from + layout.k_at(from_slot), to + layout.k_at(to_slot),
               layout.k_units, kGroupEntries);
}

void copy_values(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                 int to_slot) {
    copy_units(layout.v_unit_bytes, from + layout.v_at(from_slot), to + layout.v_at(to_slot),
               layout.v_units, layout.v_together);
}

// Gives every array of a page its place.
void place_arrays(PageLayout& layout) {
    const std::size_t n_groups =
        static_cast<std::size_t>(whole_groups(layout.entries) / kGroupEntries);
    const std::size_t n = n_groups * kGroupEntries;
    std::size_t end = 0;
    const auto place = [&](std::size_t bytes) {
        const std::size_t start = end;
        end = aligned(end + bytes);
        return start;
    };
    layout.k_offset = place(n_groups * layout.k_group_bytes());
    layout.k_scale_offset = place(n * 2 * static_cast<std::size_t>(layout.k_blocks));
    layout.v_offset = place(n_groups * layout.v_group_bytes());
    layout.v_scale_offset = place(n * 2 * static_cast<std::size_t>(layout.v_blocks));
    layout.position_offset = place(n * sizeof(std::int32_t));
    layout.importance_offset = place(n * sizeof(float));
    layout.bytes = end;
}

}  // namespace

PageLayout make_page_layout(KvType type, int k_dim, int v_dim, int entries, bool latent) {
    PageLayout layout{};
    layout.type = type;
    layout.latent = latent;
    layout.entries = entries;
    layout.k_dim = k_dim;
    layout.v_dim = v_dim;
    const PageCodec& codec = codec_of(type);
    layout.k_stride = padded(k_dim, kGroupEntries);
    layout.v_stride = padded(v_dim, latent ? kGroupEntries : codec.v_padding);
    layout.rotated = codec.rotated && !latent;
    const auto blocks = [&](int stride) {
        return codec.scaled ? (stride + kQuantBlock - 1) / kQuantBlock : 0;
    };
    layout.k_blocks = blocks(layout.k_stride);
    layout.v_blocks = latent ? 0 : blocks(layout.v_stride);
    layout.k_units = layout.k_stride / codec.k_unit_values;
    layout.v_units = latent ? 0 : layout.v_stride / codec.v_unit_values;
    layout.k_unit_bytes = codec.k_unit_bytes;
    layout.v_unit_bytes = codec.v_unit_bytes;
    layout.v_together = codec.v_together;
    place_arrays(layout);
    return layout;
}

PageLayout make_reference_layout(int entries) {
    PageLayout layout{};
    layout.elsewhere = true;
    layout.entries = entries;
    layout.k_dim = layout.v_dim = 1;
    layout.k_stride = layout.v_stride = 1;
    layout.k_units = layout.v_units = 1;
    layout.k_unit_bytes = sizeof(std::int32_t);
    layout.v_unit_bytes = sizeof(float);
    layout.v_together = 1;
    place_arrays(layout);
    return layout;
}

void copy_value(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot) {
    if (!layout.latent) copy_values(layout, from, from_slot, to, to_slot);
    const auto copy_scales = [&](std::size_t offset, int blocks) {
        const auto at = [&](int slot) {
            return offset + sizeof(std::uint16_t) * layout.scale_index(blocks, slot, 0);
        };
        copy_strided<std::uint16_t>(from + at(from_slot), to + at(to_slot), blocks, kGroupEntries);
    };
    copy_scales(layout.k_scale_offset, layout.k_blocks);
    copy_scales(layout.v_scale_offset, layout.v_blocks);
}

void copy_rows(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
               int to_slot) {
    copy_keys(layout, from, from_slot, to, to_slot);
    copy_value(layout, from, from_slot, to, to_slot);
}

void copy_entry(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot) {
    copy_rows(layout, from, from_slot, to, to_slot);
    copy_metadata(layout, from, from_slot, to, to_slot);
}

void load_k(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    codec_of(layout.type).load_k(layout, page, slot, layout.k_dim, out);
    if (layout.key_centre == nullptr) return;
    const float* centre = layout.key_centre->centre.data();
    const float* unit = layout.key_centre->unit.data();
    for (int d = 0; d < layout.k_dim; ++d) out[d] = out[d] * unit[d] + centre[d];
}

void load_v(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    const PageCodec& codec = codec_of(layout.type);
    if (layout.latent) return codec.load_k(layout, page, slot, layout.v_dim, out);
    codec.load_v(layout, page, slot, out);
}

}  // namespace entropykv
