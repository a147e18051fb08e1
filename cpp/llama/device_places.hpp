// Holds what the sequences of one context share on devices: the rows of all layers, in which each
// sequence has a place, and what steps of single tokens in llama.cpp's own graph need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "llama/device.hpp"
#include "llama/device_layer.hpp"

namespace entropykv {

// Holds what steps of single tokens need on a device, for the sequences in all places. Its parts
// have the same places in the device's memory in every such step, and so have the sources of the
// changed nodes: then a backend that records graphs need not record them again.
struct SingleSteps {
    struct Layer {
        std::vector<int> widths;      // how many rows a mask has, by group of KV heads
        std::size_t mask = 0;         // offset of the masks of the first place, in bytes
        std::size_t place_bytes = 0;  // of the masks of a place: [KV head][row], f16
        std::size_t queries = 0;      // offset: [reader][query head][token][k_dim], f32
        std::size_t rows = 0;  // offset in the input: [token][KV head], i64, where K and V go
    };

    // Returns where the mask of a place has its first value, counted in values.
    std::int64_t first_value(std::size_t layer, int place) const {
        return static_cast<std::int64_t>(
            (layers[layer].mask + static_cast<std::size_t>(place) * layers[layer].place_bytes) /
            sizeof(ggml_fp16_t));
    }
    std::size_t bytes() const;

    std::vector<Layer> layers;
    int layout = 0;  // identifies these widths
    std::unique_ptr<DeviceMemory> masks;
    std::unique_ptr<DeviceMemory> input;
    std::unique_ptr<DeviceMemory> queries;  // null: none are observed
    std::vector<std::uint8_t> written;      // the input of a step
    std::size_t mask_values = 0;
    std::size_t most_changed = 0;  // values of masks that the input has room for
    // Offsets in the input: which values of masks let tokens see themselves, i64, and as many
    // zeros.
    std::size_t own_rows = 0;
    std::size_t visible = 0;
    std::size_t n_own_rows = 0;
    bool apart = false;        // whether the device computes with layers of one place among several
    bool is_mask_due = false;  // whether this step has yet to write masks
};

class DevicePlaces {
public:
    // layers: rows for such budgets, by KV head of all layers.
    DevicePlaces(std::vector<std::unique_ptr<LayerRows>> layers, const std::vector<int>& budgets)
        : layers_(std::move(layers)), budgets_(budgets) {}

    const std::vector<int>& budgets() const { return budgets_; }
    // Tells whether a place is free and has rows for these budgets.
    bool can_take(int place, const std::vector<int>& budgets) const;
    void take(int place) { taken_[place] = true; }
    void leave(int place) noexcept { taken_[place] = false; }
    const LayerRows& rows(int layer) const { return *layers_.at(static_cast<std::size_t>(layer)); }
    SingleSteps& singles(const Device& device) { return singles_[&device]; }

private:
    std::vector<std::unique_ptr<LayerRows>> layers_;
    std::vector<int> budgets_;
    std::map<int, bool> taken_;
    std::map<const Device*, SingleSteps> singles_;
};

}  // namespace entropykv
