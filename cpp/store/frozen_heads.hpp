// Freezes and restores entries of all heads of a store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/store_components.hpp"

namespace entropykv {

// Selects frozen entries to restore.
struct RestoreRequest {
    std::int32_t frozen_after;  // frozen when the newest position was greater than this
    std::int32_t due_after;     // due to return later than this
};

class FrozenHeads {
public:
    explicit FrozenHeads(StoreComponents& components) : components_(components) {}

    // Gives every head that can freeze entries its cold storage, as the settings say. Throws
    // std::invalid_argument if no head can freeze, and for a limit or a schedule that is
    // impossible.
    void start();
    // Gives up all frozen entries, which count as evicted, and freezes nothing more.
    void stop();

    // Reserves cold storage before a micro-batch for all entries of a head that may be frozen;
    // returns how many entries may be restored because their time is over. This function and
    // freeze_all() throw what ColdHead::prepare() throws.
    int prepare(Head& head, int n_tokens);
    // Freezes all held entries between micro-batches, in the order of their slots.
    void freeze_all(std::int32_t now);
    // Restores the selected entries page by page while budgets have room; returns how many. forget:
    // detections are reset, too.
    std::size_t restore(const RestoreRequest& asked, std::int32_t now, bool forget);

private:
    std::size_t restore(Head& head, const RestoreRequest& asked, std::int32_t now);

    StoreComponents& components_;
};

class FrozenFigures {
public:
    explicit FrozenFigures(const StoreComponents& components) : components_(components) {}

    bool freezes() const { return components_.common.settings.freezing.has_value(); }
    std::size_t now() const;
    // These count events so far; recalled entries also count as restored.
    std::size_t frozen() const {
        return components_.sum_over_heads([](const Head& head) { return head.frozen.n_frozen; });
    }
    std::size_t restored() const {
        return components_.sum_over_heads([](const Head& head) { return head.frozen.n_restored; });
    }
    std::size_t recalled() const {
        return components_.sum_over_heads([](const Head& head) { return head.frozen.n_recalled; });
    }
    double seconds() const {
        return 1e-9 * static_cast<double>(
                          components_.common.cold_nanoseconds.load(std::memory_order_relaxed));
    }
    std::size_t bytes() const;         // counts pages in storage and open pages
    std::size_t sketch_bytes() const;  // counts the sketches of stored keys, which stay in memory
    // Counts the memory of cold storage besides pages and sketches: records, lists, buffers, and
    // unused pages of storage.
    std::size_t overhead_bytes() const;
    std::size_t file_bytes() const {
        return components_.storage ? components_.storage->file_bytes() : 0;
    }
    // Returns the first error of reading or writing, or null.
    const char* failure() const {
        return components_.storage ? components_.storage->failed() : nullptr;
    }

private:
    const StoreComponents& components_;
};

// Returns the positions of a head's frozen entries, ascending.
std::vector<std::int32_t> frozen_positions(const Head& head);

}  // namespace entropykv
