// What a store is asked for.
#pragma once

#include <optional>
#include <vector>

#include "decide/eviction.hpp"
#include "decide/freezing.hpp"
#include "decide/importance.hpp"
#include "decide/rope_params.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

// Of a layer with a window, KV heads hold more than what queries still see, so that they need not
// be looked through with every token. Where they are, some stay: a session may go back that far.
constexpr int kWindowSlack = 64;
constexpr int kWindowMargin = 32;

// Entries that a KV head of a layer can use, of max_entries.
int most_entries(const LayerShape& shape, int max_entries);

struct StoreSettings {
    KvType type = KvType::f16;
    ImportanceSettings importance;
    Protection protection{4, 1};
    bool own_windows = false;         // every head's recent window is half of its own budget
    bool counts_dropped = false;      // for losses; nothing is counted where it is frozen instead
    int max_tokens = 512;             // largest micro-batch
    int max_entries = 0;              // no KV head ever keeps more (the context)
    std::vector<RopeParams> ropes{};  // of the layers; none: keys and queries have no position
    std::optional<FreezeSettings> freezing{};  // none: what is not kept is dropped

    RopeParams rope_of(std::size_t layer) const {
        return ropes.empty() ? RopeParams{} : ropes.at(layer);
    }
};

// Throw std::invalid_argument for what is impossible.
void check_settings(const StoreSettings& settings);
void check_protection(const Protection& protection);

}  // namespace entropykv
