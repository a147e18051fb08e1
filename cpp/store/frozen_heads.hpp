// What all heads of a store have in cold storage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/store_parts.hpp"

namespace entropykv {

// Which frozen entries somebody asks for.
struct Asked {
    std::int32_t frozen_after;  // newest position when they were frozen
    std::int32_t due_after;     // restored later than that by themselves
};

class FrozenHeads {
public:
    explicit FrozenHeads(StoreParts& parts) : parts_(parts) {}

    // Gives every head that can freeze its cold storage, as the settings say. Throws
    // std::invalid_argument where nothing can be frozen, or a limit is too small.
    void start();
    // Gives up what is frozen, and freezes no more: what storage failed to hold.
    void stop();

    // Before a micro-batch: cold room for all that it can freeze of a head; returns how many
    // entries may come back by timers.
    int prepare(Head& head, int n_tokens);
    // Between micro-batches: freezes everything that is held, in the order of its places.
    void freeze_all(std::int32_t now);
    // Restores what is asked for, page by page, as far as the budgets have room; returns how many.
    // forget: detections so far, too.
    std::size_t restore(const Asked& asked, std::int32_t now, bool forget);

private:
    std::size_t restore(Head& head, const Asked& asked, std::int32_t now);

    StoreParts& parts_;
};

// What is counted of them.
class FrozenFigures {
public:
    explicit FrozenFigures(const StoreParts& parts) : parts_(parts) {}

    bool freezes() const { return parts_.common.settings.freezing.has_value(); }
    std::size_t now() const;
    // How often, so far; what was recalled was restored, too.
    std::size_t frozen() const {
        return parts_.total([](const Head& head) { return head.frozen.n_frozen; });
    }
    std::size_t restored() const {
        return parts_.total([](const Head& head) { return head.frozen.n_restored; });
    }
    std::size_t recalled() const {
        return parts_.total([](const Head& head) { return head.frozen.n_recalled; });
    }
    double seconds() const {
        return 1e-9 *
               static_cast<double>(parts_.common.cold_nanoseconds.load(std::memory_order_relaxed));
    }
    std::size_t bytes() const;         // of pages in storage and open ones
    std::size_t sketch_bytes() const;  // of the keys in storage, always in memory
    // All else that cold storage takes of memory: records, lists, what pages are packed with, and
    // pages of storage that nothing is in.
    std::size_t overhead_bytes() const;
    std::size_t file_bytes() const { return parts_.storage ? parts_.storage->file_bytes() : 0; }
    // What could not be read or written first, or null.
    const char* failure() const { return parts_.storage ? parts_.storage->failed() : nullptr; }

private:
    const StoreParts& parts_;
};

// Positions of what a head has frozen, ascending.
std::vector<std::int32_t> frozen_positions(const Head& head);

}  // namespace entropykv
