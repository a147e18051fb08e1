// What is known of entries that were frozen, besides K and V: every value side by side with those
// of the other records, since every step looks through some of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "decide/freezing.hpp"

namespace entropykv {

constexpr std::int32_t kActive = -1;  // frozen_at of an entry that is restored
constexpr std::int32_t kDead = -1;    // position of a record that is free
constexpr std::int32_t kNever = INT32_MAX;

struct ColdRecord {
    std::int32_t position = kDead;
    float importance = 0.0f;           // when it was frozen
    std::int32_t frozen_at = kActive;  // newest position then
    std::int32_t due = kNever;         // newest position after which it is restored
    Detections detections{};

    bool frozen() const { return frozen_at != kActive; }
};

// At least, or twice what there was: so that many small steps cost no more than few large ones.
template <typename T>
void make_room(std::vector<T>& values, std::size_t size) {
    if (values.capacity() < size) values.reserve(std::max(size, 2 * values.capacity()));
}

struct ColdRecords {
    std::vector<std::int32_t> positions;
    std::vector<float> importance;
    std::vector<std::int32_t> frozen_at;
    std::vector<std::int32_t> dues;
    std::vector<Detections> detections;

    std::size_t size() const { return positions.size(); }

    ColdRecord get(std::size_t i) const {
        return {positions[i], importance[i], frozen_at[i], dues[i], detections[i]};
    }

    void set(std::size_t i, const ColdRecord& record) {
        positions[i] = record.position;
        importance[i] = record.importance;
        frozen_at[i] = record.frozen_at;
        dues[i] = record.due;
        detections[i] = record.detections;
    }

    void reserve(std::size_t n) {
        make_room(positions, n);
        make_room(importance, n);
        make_room(frozen_at, n);
        make_room(dues, n);
        make_room(detections, n);
    }

    // New ones are free.
    void resize(std::size_t n) {
        const ColdRecord free;
        positions.resize(n, free.position);
        importance.resize(n, free.importance);
        frozen_at.resize(n, free.frozen_at);
        dues.resize(n, free.due);
        detections.resize(n, free.detections);
    }
};

}  // namespace entropykv
