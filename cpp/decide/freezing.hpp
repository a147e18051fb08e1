// Settings of cold storage: what becomes of entries that a KV head does not keep.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace entropykv {

// How K and V of frozen entries are held: as the store has them, or narrower.
enum class ColdType { as_stored, q8_0, q4_0 };

// The type of a name: "as stored", q8_0 or q4_0. Throws std::invalid_argument.
ColdType cold_type_named(const std::string& name);

// The schedule of ASR-KF-EGR. A step is one micro-batch, and its clock is the newest position. An
// entry outside the newest `window` is detected where the step's queries find little in it: where
// the mean of |q.k|, as the softmax sees it, over them and the query heads of the KV head is below
// `threshold`; or, for other measures, where their measure is below that share of its mean. The
// c-th detection within `history` positions freezes it for floor(sqrt(c) / rate) steps. Sinks stay.
struct FreezeSchedule {
    int window = 32;
    float threshold = 0.5f;
    float rate = 2.0f;
    int history = 0;  // 0: since the text began
};

struct FreezeSettings {
    ColdType type = ColdType::as_stored;
    std::size_t limit_bytes = 0;  // of cold storage, all KV heads; 0: none
    int recall_interval = 1;      // generated tokens between looking for frozen entries; 0: never
    std::optional<FreezeSchedule> schedule{};
    int descriptor = -1;                   // of an open file; -1: in memory
    std::array<std::uint64_t, 2> nonce{};  // goes into the checksum of every page of the file
};

// How often an entry was detected. Whole windows are counted, and the one before counts by the
// share of it that the sliding window still covers.
struct Detections {
    std::uint16_t current = 0;
    std::uint16_t previous = 0;
    std::int32_t number = 0;  // of the current window
};

// With one more detection, at `now`.
Detections detected(Detections detections, std::int32_t now, int history);
// How many there were within the history at the time of the last one, which is `now`.
int count_detections(Detections detections, std::int32_t now, int history);

// Steps that a detected entry is frozen for.
int freeze_steps(int detections, float rate);

}  // namespace entropykv
