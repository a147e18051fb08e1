// Holds K and V of one attention layer in tensors in the memory of the layer's device. Every KV
// head of a sequence has rows of its own: entries lie in its first rows, in the order of the
// ledger, and the tokens of the micro-batch behind them. So heads with equally many entries hide
// the same rows from a query. Only ggml's own operations read, write and move rows.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "llama/device.hpp"
#include "page/page_codec.hpp"
#include "store/layer_shape.hpp"

namespace entropykv {

// Attention reads rows up to a multiple of this, as kernels of some backends require.
constexpr int kDeviceRowStep = 256;
// K and V of a KV head begin at multiples of this many bytes, or of the alignment of their memory
// if that is greater: some backends attend to nothing else.
constexpr std::size_t kRowAlignment = 128;
// Marks a row without an entry: this position lies behind every query, so none sees it.
constexpr float kFreeRow = 1e9f;

// Throws std::invalid_argument if K and V have different types.
inline ggml_type ggml_type_of(KvType type) {
    switch (type) {
        case KvType::f16: return GGML_TYPE_F16;
        case KvType::q8_0: return GGML_TYPE_Q8_0;
        case KvType::q8_0_iq4_nl: break;
    }
    throw std::invalid_argument("K and V of rows on a device are of one type, f16 or q8_0");
}

// Returns how many rows a KV head with this budget needs: for its entries, and for the tokens of a
// micro-batch, which are read before anything is evicted.
int needed_rows(int budget, int max_tokens, int max_entries);
// Returns the least number of rows after which K and V are both at multiples of `alignment` bytes.
int row_multiple(const LayerShape& shape, ggml_type type, std::size_t alignment);
// Returns how many rows the KV heads of a layer get, each a multiple of `multiple`. Neighbours that
// need nearly as many get equally many, so that one attention node serves them: there are as few
// groups as possible if this adds at most a twentieth. For several sequences, whose rows lie evenly
// apart only if all heads have equally many, there is one group if this adds at most a half.
std::vector<int> rows_of_heads(const std::vector<int>& budgets, int max_tokens, int max_entries,
                               int multiple, int n_places);
// Returns how many rows a layer has in n_places places. head_rows: the rows of each KV head in a
// place.
std::int64_t rows_of_layer(const std::vector<int>& head_rows, int n_places);
// Returns how many rows layers have that lie one behind the other, with those that attention reads
// behind the last heads' rows.
std::int64_t rows_of_layers(const std::vector<std::vector<int>>& head_rows, int n_places);

// Returns the bytes of K and V of one entry of a layer, with values of this type.
std::size_t entry_bytes_of(const LayerShape& shape, ggml_type type);

struct RowMove {
    int from;
    int to;
};

// Says which rows of a layer are those of one KV head.
struct DeviceHead {
    int first_row = 0;             // number in the layer's tensors
    int first_position = 0;        // in the layer's positions: a multiple of kDeviceRowStep
    std::vector<float> positions;  // of the rows; kFreeRow: the row holds nothing
    int count = 0;                 // entries, in the first rows
    int staged = 0;                // tokens of the current micro-batch, behind the entries
    std::vector<int> changed;      // rows whose positions the device does not know
    std::vector<RowMove> moves;    // the moves that are due; no row is both a source and a target
    std::vector<int> unknown;  // rows of entries of which the host knows nothing, in their order
    int first_sum = 0;         // where the layer's sums of what single tokens gave have its rows
    std::vector<int> near;     // the result of rows_near(), which its next call updates
    int n_searched = 0;        // rows that rows_near() has searched since entries were moved

    int rows() const { return static_cast<int>(positions.size()); }
    // Returns how many rows attention must read.
    int used() const { return count + staged; }
    // Puts the tokens of a micro-batch behind the entries. Throws std::logic_error without room.
    void stage(int n_tokens, std::int32_t position);
    // Removes the tokens of a micro-batch that was not committed.
    void unstage();
    // Turns the tokens of the micro-batch into entries.
    void keep_staged();
    // Replaces the entries, and removes the tokens of the micro-batch.
    void hold(const std::vector<std::int32_t>& of_entries);
    // Does what hold() does, for entries that are the first n rows, in their order.
    void hold_first(int n);
    // Records that the entry of row `from` must be moved to row `to`.
    void move(int from, int to);
    // Returns the rows whose positions are in the neighbourhood of `position`: this one and those
    // before it. `position` must be greater from call to call. Only rows of entries that are new
    // are searched, unless hold() or hold_first() was called.
    const std::vector<int>& rows_near(std::int32_t position);
    void set_position(int row, float position);
};

// Refers to neighbouring KV heads with equally many rows, which one attention node serves: each of
// them is one index of the fourth dimension.
struct DeviceGroup {
    int first_head;
    int n_heads;
};

// Holds K and V of layers with one shape, whose rows lie one after another in one tensor each: so
// one operation can move or look up rows of several layers.
class RowMemory {
public:
    // n_rows: of all layers, with those that attention may read behind the last ones. Throws
    // std::bad_alloc if the device has no memory.
    RowMemory(const LayerShape& shape, ggml_type type, std::int64_t n_rows,
              ggml_backend_buffer_type_t memory);

    // Return tensors [dim][row]; v() is null if V is a part of K.
    ggml_tensor* k() const { return k_; }
    ggml_tensor* v() const { return v_; }
    std::size_t bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

private:
    std::unique_ptr<ggml_context, FreeContext> context_;
    std::unique_ptr<ggml_backend_buffer, FreeBuffer> buffer_;
    ggml_tensor* k_ = nullptr;
    ggml_tensor* v_ = nullptr;
};

// Holds K and V of a layer for several sequences. Each sequence has a place, and the rows of one
// place lie behind those of the place before, so that one attention node can read the rows of
// several places.
class LayerRows {
public:
    // Says what rows a layer needs.
    struct Wanted {
        LayerShape shape;
        ggml_backend_buffer_type_t memory;  // in which llama.cpp has the layer's cache
        std::vector<int> head_rows;         // how many rows each KV head of a place gets
    };
    // Allocates rows of layers. Throws std::bad_alloc if a device has no memory.
    static std::vector<std::unique_ptr<LayerRows>> of(const std::vector<Wanted>& layers,
                                                      ggml_type type, int n_places);

    // first: the number of the layer's first row in `memory`; bytes: how many bytes the layer takes
    // there.
    LayerRows(std::shared_ptr<const RowMemory> memory, std::int64_t first, std::size_t bytes,
              const std::vector<int>& head_rows, int n_places);

    const std::vector<int>& head_rows() const { return head_rows_; }
    int n_places() const { return n_places_; }
    int of_place() const;
    const RowMemory& memory() const { return *memory_; }
    std::int64_t first() const { return first_; }
    // Return tensors [dim][row]; v() is null if V is a part of K.
    ggml_tensor* k() const { return k_; }
    ggml_tensor* v() const { return v_; }
    std::size_t bytes() const { return bytes_; }

private:
    ggml_tensor* part_of(ggml_tensor* all);

    std::shared_ptr<const RowMemory> memory_;
    std::int64_t first_;
    std::size_t bytes_;
    std::vector<int> head_rows_;
    int n_places_;
    std::unique_ptr<ggml_context, FreeContext> context_;
    ggml_tensor* k_ = nullptr;
    ggml_tensor* v_ = nullptr;
};

// Holds the rows of one place.
class DeviceLayer {
public:
    // rows must outlive this object. alone: every KV head is a group of its own.
    DeviceLayer(const LayerShape& shape, const LayerRows& rows, int place, bool alone);

    const LayerShape& shape() const { return shape_; }
    ggml_type type() const { return all_.k()->type; }
    const std::vector<DeviceGroup>& groups() const { return groups_; }
    std::vector<DeviceHead>& heads() { return heads_; }
    const std::vector<DeviceHead>& heads() const { return heads_; }
    // Return tensors [dim][row] of all places, in which the rows of a place's heads lie one after
    // another; v() is null if V is a part of K.
    ggml_tensor* k() const { return all_.k(); }
    ggml_tensor* v() const { return all_.v(); }
    // Return the memory that has the rows of other layers, too, and the number of this layer's
    // first row in it.
    const RowMemory& memory() const { return all_.memory(); }
    std::int64_t first_in_memory() const { return all_.first(); }
    // Returns k(), and v() if V is not a part of it.
    std::vector<ggml_tensor*> tensors() const {
        return shape_.latent ? std::vector{k()} : std::vector{k(), v()};
    }
    int place() const { return place_; }
    int n_places() const { return all_.n_places(); }
    // Returns how many rows attention must read to see all entries of a group, and n_tokens more.
    int width_of(const DeviceGroup& group, int n_tokens) const;
    // Tells whether all heads of a group have equally many entries.
    bool is_even(const DeviceGroup& group) const;
    // Returns how many positions all heads together have; each has a multiple of kDeviceRowStep.
    int n_positions() const { return n_positions_; }
    // Returns how many sums of what single tokens gave all heads together have, and each head of a
    // group: as many as rows, in whole steps, whatever the positions are.
    int n_sums() const { return n_sums_; }
    int sum_stride(const DeviceGroup& group) const;
    // Returns how many positions each head of a group has.
    int position_stride(const DeviceGroup& group) const;
    // Gives every head of a group as many positions as `widths` says for it.
    void lay_out_positions(const std::vector<int>& widths);
    // Both return, for every group, how many positions each of its heads has, a multiple of
    // kDeviceRowStep: full_widths() for all rows, widths() for all entries and n_tokens more.
    std::vector<int> full_widths() const;
    std::vector<int> widths(int n_tokens) const;

    // Returns the bytes of the layer's rows divided by the number of places, rounded up, so that
    // all places together count at least all rows.
    std::size_t bytes() const;
    std::size_t entry_bytes() const { return entry_bytes_of(shape_, type()); }

private:
    LayerShape shape_;
    const LayerRows& all_;
    int place_;
    std::vector<DeviceHead> heads_;
    std::vector<DeviceGroup> groups_;
    int n_positions_ = 0;
    int n_sums_ = 0;
};

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
    int layout = 0;  // identifies the widths of all layers
    std::unique_ptr<DeviceMemory> masks;
    std::unique_ptr<DeviceMemory> input;
    std::unique_ptr<DeviceMemory> queries;  // null: none are observed
    std::vector<std::uint8_t> written;      // the input of a step
    std::size_t mask_values = 0;
    std::size_t most_changed = 0;  // values of masks that the input has room for
    // Hold offsets in the input: which values of masks let tokens see themselves, i64, and as many
    // zeros.
    std::size_t own_rows = 0;
    std::size_t visible = 0;
    std::size_t n_own_rows = 0;
    bool apart = false;        // whether the device computes with layers of one place among several
    bool is_mask_due = false;  // whether this step has yet to write masks
};

// Holds what the sequences of one context share on devices: the rows of all layers, in which each
// sequence has a place, and what steps of single tokens in llama.cpp's own graph need.
class DevicePlaces {
public:
    // layers: the rows of all layers, which are enough for `budgets`, by KV head of all layers.
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
