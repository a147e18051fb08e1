#include "store/store_parts.hpp"

#include <algorithm>

#include "platform/scratch.hpp"

namespace entropykv {

StoreParts::StoreParts(const std::vector<LayerShape>& shapes, const StoreSettings& settings,
                       std::shared_ptr<StorePool> pool)
    : common(settings),
      share(pool != nullptr
                ? std::move(pool)
                : std::make_shared<StorePool>(shapes, settings.type, settings.max_tokens)),
      queries(common) {
    check_settings(settings);
    const std::vector<PageLayout> layouts = page_layouts(shapes, settings.type);
    layers.reserve(shapes.size());  // heads know where their layer is
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        layers.push_back({shapes[i], layouts[i]});
        StoreLayer& layer = layers.back();
        for (int h = 0; h < shapes[i].n_head_kv; ++h)
            layer.heads.emplace_back(layer.shape, layer.layout, share);
        if (settings.counts_dropped && !settings.freezing)
            for (Head& head : layer.heads) head.dropped.emplace();
        if (queries.follows()) queries.follow(i, layer.heads);
    }
}

void StoreParts::size_workspaces(int upcoming) {
    int held = std::max(most_loaded, upcoming);
    std::size_t page_entries = 0;
    std::size_t key_values = 0;
    for (const StoreLayer& layer : layers) {
        page_entries = std::max(page_entries, PageLayout::index(layer.layout.entries));
        key_values = std::max(key_values, PageLayout::index(layer.layout.k_stride));
        for (const Head& head : layer.heads) held = std::max(held, head.budget());
    }
    const std::size_t n = PageLayout::index(held) + PageLayout::index(common.settings.max_tokens);
    for (Workspace& workspace : workspaces) {
        workspace.ranking.size(n, page_entries, key_values);
        if (!storage) continue;
        workspace.recall.size(n, page_entries, share.page_bytes());
        if (workspace.page_read.size() == 0)
            workspace.page_read = AlignedBytes(storage->page_bytes() + share.page_bytes());
    }
}

std::size_t StoreParts::scratch_bytes() const {
    std::size_t bytes =
        total([](const Head& head) { return bytes_of(head.pages.copied_importance()); });
    for (const Workspace& workspace : workspaces)
        bytes += workspace.ranking.bytes() + workspace.recall.bytes() + workspace.page_read.size();
    return bytes;
}

void StoreParts::keep_budgets() {
    over_heads([&](Head& head) {
        if (head.count() > head.budget()) workspaces.front().keeper.keep_best(head);
        head.drop_empty_pages();
    });
    share.note_peak();
}

void StoreParts::own_all() {
    share.pool().make_room([&] {
        return total([](const Head& head) { return head.pages.foreign(0, head.pages.size()); });
    });
    over_heads([](Head& head) { head.pages.own_from(0); });
}

}  // namespace entropykv
