// Prefetches weights. The hardware cannot see that several rows, each read on its own, are
// contiguous, nor what follows them. Without this, one token runs at a third of the speed of
// memory.
#pragma once

#include <cstddef>

namespace entropykv {
namespace {

constexpr std::size_t kLine = 64;

// Prefetches memory from an address on, evenly while other memory is multiplied: what is asked for
// in a burst is waited for. kNear: into the L1 cache, otherwise into the L2 cache, which takes more
// requests at a time.
template <bool kNear>
class WeightsAhead {
public:
    explicit WeightsAhead(const std::byte* first) : at_(first) {}

    template <std::size_t kBytes>
    void advance() {
#pragma GCC unroll 32
        for (std::size_t i = 0; i < kBytes; i += kLine) prefetch(at_ + i);
        at_ += kBytes;
    }
    void advance(std::size_t bytes) {
        for (const std::byte* end = at_ + bytes; at_ < end; at_ += kLine) prefetch(at_);
    }

private:
    static void prefetch(const std::byte* at) { __builtin_prefetch(at, 0, kNear ? 3 : 2); }

    const std::byte* at_;
};

// The product of one token takes several rows at a time. What is prefetched meanwhile lies behind
// these rows, and at least this many bytes ahead: kAhead for the L1 cache, kFarAhead for the L2
// cache.
constexpr std::size_t kAhead = 8192;
constexpr std::size_t kFarAhead = 16384;
// The L1 cache has room for this many bytes beside the rows that are multiplied.
constexpr std::size_t kMostNear = 12288;

}  // namespace
}  // namespace entropykv
