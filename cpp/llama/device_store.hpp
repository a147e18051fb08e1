// Keeps the entries of one sequence where the weights are: K and V lie in rows on the device of
// their layer, and the host decides who stays. It does so with the same store as the CPU, whose
// entries are small here: the "ledger" holds positions, importance, and instead of K and V the
// number of an entry's row and the norm of its value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "llama/device_attention.hpp"
#include "llama/device_layer.hpp"
#include "store/head_store.hpp"

namespace entropykv {

// Is what a layer needs of llama.cpp's graph.
struct DeviceLayerSource {
    LayerShape shape;
    ggml_backend_buffer_type_t memory;    // where llama.cpp has the layer's cache
    std::vector<std::int32_t> op_params;  // of its attention node
};

class DeviceStore {
public:
    // budgets: entries by KV head of all layers; importance, protection, max_tokens and max_entries
    // of `settings` are used, and its type is that of K and V. Throws std::invalid_argument for a
    // measure that needs keys on the host, std::runtime_error if a device cannot compute attention,
    // std::bad_alloc if it has no memory.
    DeviceStore(const std::vector<DeviceLayerSource>& layers, const StoreSettings& settings,
                const std::vector<int>& budgets, int n_threads);
    DeviceStore(const DeviceStore&) = delete;
    DeviceStore& operator=(const DeviceStore&) = delete;

    // Must be called before every micro-batch; `position` is that of its first token.
    void reserve(int n_tokens, std::int32_t position);
    // Computes the attention of a layer, and then commits its entries. GraphHook calls this between
    // two nodes, so errors are kept for check_step().
    void attend(int layer, const DeviceNode& node) noexcept;
    // Throws std::runtime_error with what went wrong since reserve().
    void check_step() const;

    // Sets smaller or equal budgets; heads that hold more evict. Throws std::invalid_argument if a
    // budget has no rows on the device.
    void set_budgets(const std::vector<int>& budgets, const Protection& protection);
    // Drops the entries at positions >= position.
    void truncate(std::int32_t position);

    // Frees all memory of the devices; nothing may be read or saved afterwards. A device may be
    // gone when the garbage collector ends the store, so closing a session must not wait for that.
    void release() noexcept;

    // Returns how many layers there are; 0 after release().
    int n_layers() const { return static_cast<int>(layers_.size()); }
    const HeadStore& ledger() const { return ledger_; }
    std::size_t entries() const { return ledger_.entries(); }
    std::size_t evicted() const { return ledger_.evicted(); }
    void set_evicted(std::size_t n) { ledger_.components().common.evicted = n; }
    int budget(int layer, int head) const { return ledger_.head(layer, head).budget(); }
    int count(int layer, int head) const { return ledger_.head(layer, head).count(); }
    std::vector<std::int32_t> positions(int layer, int head) const {
        return positions_of(ledger_.head(layer, head));
    }
    double eviction_seconds() const {
        return 1e-9 * static_cast<double>(ledger_.components().common.eviction_nanoseconds.load());
    }

    // Count bytes on the devices: of the entries that budgets allow, of those that are held, the
    // most that were held, and of the rows that a micro-batch and the padding of groups take.
    std::size_t budget_bytes() const;
    std::size_t used_bytes() const;
    std::size_t peak_bytes() const { return peak_; }
    std::size_t staging_bytes() const;
    // Counts working memory, on devices and on the host, with the ledger.
    std::size_t scratch_bytes() const;
    // Returns the bytes of K, V and working memory by the names of the devices.
    std::vector<std::pair<std::string, std::size_t>> device_bytes() const;

    // Save and load a head in the format of the headwise store: see head_states.hpp.
    std::size_t state_bytes(int layer, int head) const;
    void save_head(int layer, int head, std::byte* state);
    std::string state_problem(int layer, int count, const std::byte* state, std::size_t size,
                              std::int32_t end) const;
    // Returns how many entries a head can load, more than which its rows cannot hold.
    int most_loaded(int layer, int head) const;
    // Replaces the entries of all heads; states are as state_problem() accepts them.
    void load(const std::vector<int>& counts, const std::vector<std::byte*>& states);

private:
    struct Layer {
        DeviceLayer rows;
        DeviceAttention* device;
        PageLayout layout;  // of the headwise store's pages, for saved states
    };

    void add_layer(const DeviceLayerSource& source, const std::vector<int>& head_rows,
                   int n_threads);
    void check_supported(const std::vector<DeviceLayerSource>& layers);
    std::size_t pages_of(const std::vector<int>& budgets) const;
    void commit(int layer, const DeviceFindings& found);
    void stage(int layer, int head, const float* value_squares);
    // Finds out in which rows the entries of a head lie.
    void find_rows(int layer, int head);

    HeadStore ledger_;
    KvType type_;
    std::vector<std::unique_ptr<DeviceAttention>> devices_;
    std::vector<Layer> layers_;
    std::vector<float> observed_;  // of one head, in the order of its entries
    DeviceStep step_;
    std::size_t peak_ = 0;
    std::string fault_;
};

}  // namespace entropykv
