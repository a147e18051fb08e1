#include "page/page_layout.hpp"

#include <cstring>
#include <stdexcept>

#include "platform/half.hpp"

namespace entropykv {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

int padded(int dim) { return (dim + 15) / 16 * 16; }

int whole_groups(int entries) {
    return (entries + kGroupEntries - 1) / kGroupEntries * kGroupEntries;
}

template <typename T>
void copy_strided(const std::byte* from, std::size_t from_index, std::byte* to,
                  std::size_t to_index, int n, std::size_t stride) {
    const T* source = reinterpret_cast<const T*>(from) + from_index;
    T* target = reinterpret_cast<T*>(to) + to_index;
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i)
        target[i * stride] = source[i * stride];
}

void copy_keys(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
               int to_slot) {
    from += layout.k_offset;
    to += layout.k_offset;
    const std::size_t first = layout.k_index(from_slot, 0);
    const std::size_t target = layout.k_index(to_slot, 0);
    if (layout.type == KvType::f16) {
        copy_strided<std::uint16_t>(from, first, to, target, layout.k_stride, kGroupEntries);
    } else {
        copy_strided<std::uint32_t>(from, first / 4, to, target / 4, layout.k_stride / 4,
                                    kGroupEntries);
    }
}

void copy_values(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                 int to_slot) {
    const std::size_t value = layout.v_index(from_slot, 0);
    const std::size_t target = layout.v_index(to_slot, 0);
    if (layout.type == KvType::f16) {
        std::memcpy(to + layout.v_offset + 2 * target, from + layout.v_offset + 2 * value,
                    2 * PageLayout::index(layout.v_stride));
    } else {
        copy_strided<std::uint8_t>(from + layout.v_offset, value, to + layout.v_offset, target,
                                   layout.v_stride, 4);
    }
}

// The first n values of a K row.
void load_keys(const PageLayout& layout, const std::byte* page, int slot, int n, float* out) {
    if (layout.type == KvType::f16) {
        const auto* k = reinterpret_cast<const std::uint16_t*>(page + layout.k_offset) +
                        layout.k_index(slot, 0);
        for (int d = 0; d < n; ++d) out[d] = half_to_float(k[d * kGroupEntries]);
        return;
    }
    const auto* k =
        reinterpret_cast<const std::uint8_t*>(page + layout.k_offset) + layout.k_index(slot, 0);
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

}  // namespace

KvType kv_type_named(const std::string& name) {
    if (name == "f16") return KvType::f16;
    if (name == "q8_0") return KvType::q8_0;
    throw std::invalid_argument("kv_type must be f16 or q8_0, not " + name);
}

PageLayout make_page_layout(KvType type, int k_dim, int v_dim, int entries, bool latent) {
    PageLayout layout{};
    layout.type = type;
    layout.latent = latent;
    layout.entries = entries;
    layout.k_dim = k_dim;
    layout.v_dim = v_dim;
    layout.k_stride = padded(k_dim);
    layout.v_stride = padded(v_dim);
    const bool quantised = type == KvType::q8_0;
    layout.k_blocks = quantised ? (layout.k_stride + kQuantBlock - 1) / kQuantBlock : 0;
    layout.v_blocks = quantised && !latent ? (layout.v_stride + kQuantBlock - 1) / kQuantBlock : 0;
    const std::size_t n = static_cast<std::size_t>(whole_groups(entries));
    const std::size_t value = layout.value_bytes();
    std::size_t end = 0;
    const auto place = [&](std::size_t bytes) {
        const std::size_t start = end;
        end = aligned(end + bytes);
        return start;
    };
    layout.k_offset = place(n * value * static_cast<std::size_t>(layout.k_stride));
    layout.k_scale_offset = place(n * 2 * static_cast<std::size_t>(layout.k_blocks));
    layout.v_offset = place(latent ? 0 : n * value * static_cast<std::size_t>(layout.v_stride));
    layout.v_scale_offset = place(n * 2 * static_cast<std::size_t>(layout.v_blocks));
    layout.position_offset = place(n * sizeof(std::int32_t));
    layout.importance_offset = place(n * sizeof(float));
    layout.bytes = end;
    return layout;
}

void copy_value(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot) {
    if (!layout.latent) copy_values(layout, from, from_slot, to, to_slot);
    if (layout.type == KvType::f16) return;
    const auto copy_scales = [&](std::size_t offset, int blocks) {
        copy_strided<std::uint16_t>(from + offset, layout.scale_index(blocks, from_slot, 0),
                                    to + offset, layout.scale_index(blocks, to_slot, 0), blocks,
                                    kGroupEntries);
    };
    copy_scales(layout.k_scale_offset, layout.k_blocks);
    if (!layout.latent) copy_scales(layout.v_scale_offset, layout.v_blocks);
}

void copy_rows(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
               int to_slot) {
    copy_keys(layout, from, from_slot, to, to_slot);
    copy_value(layout, from, from_slot, to, to_slot);
}

void copy_marks(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot) {
    layout.positions(to)[to_slot] = layout.positions(from)[from_slot];
    layout.importance(to)[to_slot] = layout.importance(from)[from_slot];
}

void copy_entry(const PageLayout& layout, const std::byte* from, int from_slot, std::byte* to,
                int to_slot) {
    copy_rows(layout, from, from_slot, to, to_slot);
    copy_marks(layout, from, from_slot, to, to_slot);
}

void load_k(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    load_keys(layout, page, slot, layout.k_dim, out);
}

void load_v(const PageLayout& layout, const std::byte* page, int slot, float* out) {
    if (layout.latent) return load_keys(layout, page, slot, layout.v_dim, out);
    const std::byte* values = page + layout.v_offset;
    const auto* scales = reinterpret_cast<const std::uint16_t*>(page + layout.v_scale_offset);
    for (int d = 0; d < layout.v_dim; ++d) {
        const std::size_t place = layout.v_index(slot, d);
        if (layout.type == KvType::f16) {
            out[d] = half_to_float(reinterpret_cast<const std::uint16_t*>(values)[place]);
        } else {
            const auto scale =
                scales[PageLayout::scale_index(layout.v_blocks, slot, d / kQuantBlock)];
            out[d] = static_cast<float>(reinterpret_cast<const std::int8_t*>(values)[place]) *
                     half_to_float(scale);
        }
    }
}

}  // namespace entropykv
