#include "store/layer_shape.hpp"

#include <algorithm>
#include <stdexcept>

#include "cold/cold_codec.hpp"

namespace entropykv {
namespace {

void check_shapes(const std::vector<LayerShape>& shapes) {
    if (shapes.empty()) throw std::invalid_argument("a store needs layers");
    for (const LayerShape& shape : shapes) {
        if (shape.n_head_kv < 1 || shape.n_head < 1 || shape.n_head % shape.n_head_kv != 0)
            throw std::invalid_argument("query heads must be a multiple of KV heads");
        if (shape.k_dim < 1 || shape.v_dim < 1 || shape.k_dim > kMaxHeadDim ||
            shape.v_dim > kMaxHeadDim)
            throw std::invalid_argument("a head size outside of 1 .. 1024");
        if (shape.latent && shape.v_dim > shape.k_dim)
            throw std::invalid_argument("V cannot be more values than the K that it is a part of");
        if (shape.readers < 1) throw std::invalid_argument("entries that no layer reads");
        if (shape.window < 0 || shape.window > kMostPositions)
            throw std::invalid_argument("a window outside of 0 .. 2^30 tokens");
    }
}

PageLayout layout_of(const LayerShape& shape, KvType type, int entries) {
    if (shape.elsewhere) return make_reference_layout(entries);
    return make_page_layout(type, shape.k_dim, shape.v_dim, entries, shape.latent);
}

}  // namespace

std::size_t pool_page_bytes(const std::vector<LayerShape>& layers, KvType type) {
    check_shapes(layers);
    std::size_t bytes = 0;
    for (const LayerShape& shape : layers)
        bytes = std::max(bytes, layout_of(shape, type, kPageEntries).bytes);
    return bytes;
}

std::vector<PageLayout> page_layouts(const std::vector<LayerShape>& layers, KvType type) {
    const std::size_t bytes = pool_page_bytes(layers, type);
    std::vector<PageLayout> layouts;
    for (const LayerShape& shape : layers) {
        int entries = kPageEntries;
        const auto fits = [&](int n) { return layout_of(shape, type, n).bytes <= bytes; };
        while (fits(entries + kGroupEntries)) entries += kGroupEntries;
        layouts.push_back(layout_of(shape, type, entries));
    }
    return layouts;
}

std::size_t cold_page_bytes(const std::vector<LayerShape>& layers, KvType type,
                            ColdType cold_type) {
    const std::vector<PageLayout> layouts = page_layouts(layers, type);
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < layers.size(); ++i)
        if (layers[i].window == 0)
            bytes = std::max(bytes, ColdCodec(cold_type, layouts[i]).bytes());
    return bytes;
}

}  // namespace entropykv
