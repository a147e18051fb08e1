// The units of work of one layer. Split says how a micro-batch becomes units: rows of queries form
// tiles, and tiles either form bands or are cut along the entries. This depends on lengths alone,
// not on the number of threads, so that results are the same bit by bit with any number of threads.
// UnitQueue gives the units to ggml's threads, one after another.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "store/layer_shape.hpp"

namespace entropykv {

struct RowTile {  // rows [first, first + count) of a KV head
    int head;
    int number;
    int first;
    int count;
};

struct Unit {
    RowTile tile;  // the first tile of a band
    int chunk;
};

struct Split {
    int group;      // query heads per KV head
    int rows;       // n_tokens * group; the rows of a token are neighbours
    int tile_rows;  // rows of a full tile
    int tiles;
    int band_tiles;   // tiles of a band; one thread attends to them in turn
    bool by_rows;     // whether the prompt kernel is used
    bool by_entries;  // a unit is a range of entries of a tile, to be merged; otherwise a band

    static Split of(const LayerShape& shape, int n_tokens);

    // chunk_entries() says how many entries a unit has if the head has `total` of them; chunks()
    // says how many such units a tile has.
    int chunk_entries(int total) const;
    int chunks(int total) const;
    // Returns the most chunks of a tile with up to `most` entries; longer heads may have fewer
    // chunks, because their units are larger.
    int most_chunks(int most) const;
    // Returns how many units a head with `total` entries has.
    int units(int total) const;
    RowTile tile(int head, int number) const;
    // Returns a unit by its number within the head.
    Unit unit(int head, int number, int total) const;
};

// Holds the units of one reader of a layer that no thread has claimed yet.
class UnitQueue {
public:
    struct Cursor {  // is where a thread looks for its next unit
        bool others = false;
        int head = 0;
    };

    explicit UnitQueue(int n_heads);

    // Must be called before a layer; units_of(head) returns how many units a KV head has.
    template <typename UnitsOf>
    void fill(UnitsOf units_of) noexcept {
        int units = 0;
        for (int h = 0; h < n_heads(); ++h) {
            const int of_head = units_of(h);
            first_unit_[index(h)] = units;
            unfinished_units_[index(h)].store(of_head, std::memory_order_relaxed);
            next_unit_[index(h)].store(units, std::memory_order_relaxed);
            units += of_head;
        }
        first_unit_[index(n_heads())] = units;
        unfinished_heads_.store(n_heads(), std::memory_order_relaxed);
    }

    // Claims a unit of the heads that this thread owns, or else of another head; -1 if there is
    // none left.
    template <typename Owns>
    int claim(Cursor& cursor, Owns owns) noexcept {
        while (true) {
            for (; cursor.head < n_heads(); ++cursor.head) {
                if (owns(cursor.head) == cursor.others) continue;
                std::atomic<int>& next = next_unit_[index(cursor.head)];
                const int unit = next.fetch_add(1, std::memory_order_relaxed);
                if (unit < first_unit_[index(cursor.head + 1)]) return unit;
            }
            if (cursor.others) return -1;
            cursor = {true, 0};
        }
    }

    int first_unit(int head) const { return first_unit_[index(head)]; }
    int head_of(int unit) const {
        int head = 0;
        while (unit >= first_unit_[index(head + 1)]) ++head;
        return head;
    }

    // ends_head() is called after each unit, and tells whether it was the last one of its head;
    // ends_layer() is called after each head, and tells whether it was the last one of the layer.
    bool ends_head(int head) noexcept {
        return unfinished_units_[index(head)].fetch_sub(1, std::memory_order_acq_rel) == 1;
    }
    bool ends_layer() noexcept {
        return unfinished_heads_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    }

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    int n_heads() const { return static_cast<int>(first_unit_.size()) - 1; }

    std::vector<int> first_unit_;  // first unit of each head, then the number of units
    std::unique_ptr<std::atomic<int>[]> unfinished_units_;
    std::unique_ptr<std::atomic<int>[]> next_unit_;  // next unit of each head
    std::atomic<int> unfinished_heads_{0};
};

inline UnitQueue::UnitQueue(int n_heads)
    : first_unit_(index(n_heads + 1)),
      unfinished_units_(std::make_unique<std::atomic<int>[]>(index(n_heads))),
      next_unit_(std::make_unique<std::atomic<int>[]>(index(n_heads))) {}

}  // namespace entropykv
