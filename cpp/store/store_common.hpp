// Holds what all components of a store use: its settings (types, sizes, how entries are ranked, and
// freezing), the current micro-batch, and counters.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "decide/eviction.hpp"
#include "decide/freezing.hpp"
#include "decide/importance.hpp"
#include "decide/key_centre.hpp"
#include "decide/rope_params.hpp"
#include "kernels/kernels.hpp"
#include "store/head.hpp"

namespace entropykv {

// In a layer with a window, KV heads hold up to kWindowSlack more entries than queries attend to,
// so that no head must be searched at every token. When a head is searched, kWindowMargin of those
// entries stay, for a rollback.
constexpr int kWindowSlack = 64;
constexpr int kWindowMargin = 32;

// Returns how many entries a KV head of a layer can use, of max_entries.
int most_entries(const LayerShape& shape, int max_entries);

struct StoreSettings {
    KvType type = KvType::f16;
    ImportanceSettings importance;
    Protection protection{4, 1};
    bool own_windows = false;     // sinks and recent window: at most half of a head's budget
    bool counts_dropped = false;  // losses include dropped entries, unless they are frozen
    int max_tokens = 512;         // largest micro-batch
    int max_entries = 0;          // the context: no KV head keeps more
    // Holds a RoPE for each layer; empty: K and queries do not depend on their position.
    std::vector<RopeParams> ropes{};
    // Say how the keys of every layer's KV heads are stored, [layer][KV head]; a layer without any
    // stores them as they are, and so does a store without layers here.
    std::vector<std::vector<KeyCentre>> key_centres{};
    std::optional<FreezeSettings> freezing{};  // unset: what is not kept is dropped
    // True if the staging area holds the micro-batch of all layers at a time, and not of one layer
    // after another. Takes effect for a store with a pool of its own.
    bool stages_all_layers = false;

    RopeParams rope_of(std::size_t layer) const {
        return ropes.empty() ? RopeParams{} : ropes.at(layer);
    }
};

// Both throw std::invalid_argument for impossible values.
void check_settings(const StoreSettings& settings);
void check_protection(const Protection& protection);

struct StoreCommon {
    explicit StoreCommon(const StoreSettings& asked) : settings(asked) {}

    StoreSettings settings;
    const KernelTable* kernels = &kKernelsPortable;
    std::optional<FreezeSchedule> schedule{};  // unset while no schedule is followed
    std::vector<int> knots{};                  // kept entries for which losses are measured
    std::int32_t newest = 0;                   // the last position of the micro-batch
    bool single_query = false;                 // whether the micro-batch has one query
    std::atomic<std::size_t> evicted{0};
    std::atomic<std::int32_t> whole_from{0};  // see HeadStore::windows_whole_from()
    std::atomic<std::int64_t> eviction_nanoseconds{0};
    std::atomic<std::int64_t> cold_nanoseconds{0};

    const ImportanceSettings& importance() const { return settings.importance; }
    const Measure& measure() const { return settings.importance.measure(); }
    bool predicts() const { return importance().predicts(); }
    bool measures_losses() const { return !knots.empty(); }
    // Under a schedule, the queries of all tokens count.
    int scoring_interval() const { return schedule ? 1 : kScoringInterval; }
    int neighbourhood() const { return schedule ? 0 : kNeighbourhood; }
    // Returns what a head must keep for the queries after position `newest_seen`.
    Protection protection_of(const Head& head, std::int32_t newest_seen) const {
        Protection protection =
            settings.own_windows ? settings.protection.within(head.budget()) : settings.protection;
        protection.oldest = head.shape().oldest_seen(newest_seen + 1);
        return protection;
    }
    // Notes that an entry was dropped because it left the window of its layer.
    void note_left_window(const LayerShape& shape, std::int32_t position) noexcept {
        const std::int32_t from = shape.first_blind(position);
        std::int32_t known = whole_from.load(std::memory_order_relaxed);
        while (known < from &&
               !whole_from.compare_exchange_weak(known, from, std::memory_order_relaxed)) {
        }
    }
};

}  // namespace entropykv
