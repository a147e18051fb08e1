// Holds the settings of cold storage and of the freeze schedule, and counts detections.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace entropykv {

// Says how K and V of frozen entries are kept: as they are in the store, or narrower.
enum class ColdType { as_stored, q8_0, q4_0 };

// Returns the type named "as stored", "q8_0" or "q4_0". Throws std::invalid_argument for other
// names.
ColdType cold_type_named(const std::string& name);

// Holds the schedule of ASR-KF-EGR. A step is one micro-batch, and its time is the newest position.
// In each step, an entry outside the newest `window` positions is detected if it gets little
// attention: for measure products, if the mean of |q.k| (scaled as for the softmax) over the step's
// queries and the query heads of the KV head is below `threshold`; for other measures, if it gets
// less than `threshold` times the mean over all entries. The c-th detection within `history`
// positions freezes the entry for floor(sqrt(c) / rate) steps. The schedule freezes no sinks.
struct FreezeSchedule {
    int window = 32;
    float threshold = 0.5f;
    float rate = 2.0f;
    int history = 0;  // 0: since the beginning of the text
};

struct FreezeSettings {
    ColdType type = ColdType::as_stored;
    std::size_t limit_bytes = 0;  // all KV heads share it; 0: no limit
    int recall_interval = 1;      // generated tokens from one recall to the next; 0: never
    std::optional<FreezeSchedule> schedule{};
    int descriptor = -1;  // of an open file that frozen entries go to; -1: to memory
    std::array<std::uint64_t, 2> nonce{};  // goes into the checksum of every page of the file
};

// Counts how often an entry was detected. Counts are per window of positions, and the previous
// window counts in proportion to how much of it the sliding history still covers.
struct Detections {
    std::uint16_t current = 0;
    std::uint16_t previous = 0;
    std::int32_t number = 0;  // number of the current window
};

// Returns the counts after one more detection at position `now`. history: see FreezeSchedule.
Detections detected(Detections detections, std::int32_t now, int history);
// Returns how many detections lie within the history. `now` must be the position of the last one.
int count_detections(Detections detections, std::int32_t now, int history);

// Returns for how many steps an entry is frozen: floor(sqrt(detections) / rate), at most 1e9.
int freeze_steps(int detections, float rate);

}  // namespace entropykv
