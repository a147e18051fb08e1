// Prefetches weights. The hardware cannot see that several rows, each read on its own, are
// contiguous, nor what follows them. Without this, one token runs at a third of the speed of
// memory.
#pragma once

#include <cstddef>

namespace entropykv {
namespace {

constexpr std::size_t kLine = 64;
// So far ahead of the rows that are multiplied with one token, memory is prefetched.
constexpr std::size_t kAhead = 8192;

inline void prefetch_bytes(const std::byte* first, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(first + i);
}

// Prefetches the tile of rows that follows one, while that one is computed, evenly: memory that is
// asked for in a burst is waited for. It goes to the L2 cache: the L1 cache holds less than a tile,
// and has room for few requests at a time, for which the products of a few tokens would wait.
class NextTile {
public:
    explicit NextTile(const std::byte* first) : line_(first), due_(first) {}

    // Prefetches so many more bytes.
    void advance(std::size_t bytes) {
        for (due_ += bytes; line_ < due_; line_ += kLine) __builtin_prefetch(line_, 0, 2);
    }

private:
    const std::byte *line_, *due_;
};

}  // namespace
}  // namespace entropykv
