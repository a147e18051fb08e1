// Holds the settings of a headwise store: types, sizes, how entries are ranked, and freezing.
#pragma once

#include <optional>
#include <vector>

#include "decide/eviction.hpp"
#include "decide/freezing.hpp"
#include "decide/importance.hpp"
#include "decide/key_centre.hpp"
#include "decide/rope_params.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

// In a layer with a window, KV heads hold up to kWindowSlack more entries than queries attend to,
// so that they need not be searched at every token. When they are, kWindowMargin of those entries
// stay, for a rollback.
constexpr int kWindowSlack = 64;
constexpr int kWindowMargin = 32;

// Returns how many entries a KV head of a layer can use, of max_entries.
int most_entries(const LayerShape& shape, int max_entries);

struct StoreSettings {
    KvType type = KvType::f16;
    ImportanceSettings importance;
    Protection protection{4, 1};
    bool own_windows = false;     // recent window: half of the head's own budget
    bool counts_dropped = false;  // losses include dropped entries, unless they are frozen
    int max_tokens = 512;         // largest micro-batch
    int max_entries = 0;          // the context: no KV head keeps more
    // One for each layer; empty: K and queries do not depend on their position.
    std::vector<RopeParams> ropes{};
    // Say how the keys of every layer's KV heads are stored, [layer][KV head]; a layer without any
    // stores them as they are, and so does a store without layers here.
    std::vector<std::vector<KeyCentre>> key_centres{};
    std::optional<FreezeSettings> freezing{};  // unset: what is not kept is dropped
    // True if the micro-batch of all layers is staged at a time, and not of one layer after
    // another. Takes effect for a store with a pool of its own.
    bool stages_all_layers = false;

    RopeParams rope_of(std::size_t layer) const {
        return ropes.empty() ? RopeParams{} : ropes.at(layer);
    }
};

// Both throw std::invalid_argument for impossible values.
void check_settings(const StoreSettings& settings);
void check_protection(const Protection& protection);

}  // namespace entropykv
