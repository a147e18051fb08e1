// Deals the numbered pieces of an op out to its threads: each has a range of consecutive pieces,
// and one that has finished its own takes pieces from the ends of the others' ranges. So nobody
// waits for a thread whose core is slower, or is used by others for a while.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace entropykv {

class StealingRanges {
public:
    explicit StealingRanges(int n_threads) : ranges_(static_cast<std::size_t>(n_threads)) {}

    // Returns the next piece of the thread's own range, or else the last one of another's, or else
    // -1. Every thread [0, n_threads) of an op with pieces [0, n_pieces) calls take() until it
    // returns -1, then leave(). No thread may begin the next op before all have left.
    int take(int n_pieces, int thread, int n_threads) noexcept {
        for (int i = 0; i < n_threads; ++i) {
            const int owner = (thread + i) % n_threads;
            std::atomic<std::uint64_t>& range = at(owner);
            std::uint64_t old = range.load(std::memory_order_relaxed);
            while (true) {
                const Range left = old == kUntouched ? dealt(n_pieces, owner, n_threads) : of(old);
                if (left.first >= left.last) break;
                const Range rest =
                    i == 0 ? Range{left.first + 1, left.last} : Range{left.first, left.last - 1};
                if (range.compare_exchange_weak(old, bits_of(rest), std::memory_order_relaxed))
                    return static_cast<int>(i == 0 ? left.first : rest.last);
            }
        }
        return -1;
    }
    void leave(int n_threads) noexcept {
        if (n_left_.fetch_add(1, std::memory_order_acq_rel) + 1 < n_threads) return;
        n_left_.store(0, std::memory_order_relaxed);
        for (int i = 0; i < n_threads; ++i) at(i).store(kUntouched, std::memory_order_relaxed);
    }

private:
    static constexpr std::size_t kLine = 64;
    static constexpr int kBits = 32;
    static constexpr std::uint64_t kUntouched = ~std::uint64_t{0};

    // Holds the pieces [first, last).
    struct Range {
        std::uint32_t first, last;
    };
    static Range dealt(int n_pieces, int thread, int n_threads) noexcept {
        const auto bound = [&](int i) {
            return static_cast<std::uint32_t>(std::int64_t{n_pieces} * i / n_threads);
        };
        return {bound(thread), bound(thread + 1)};
    }
    static Range of(std::uint64_t bits) noexcept {
        return {static_cast<std::uint32_t>(bits >> kBits), static_cast<std::uint32_t>(bits)};
    }
    static std::uint64_t bits_of(const Range& range) noexcept {
        return std::uint64_t{range.first} << kBits | range.last;
    }

    // Holds the rest of a range, once a thread has taken a piece of it in this op.
    struct alignas(kLine) Rest {
        std::atomic<std::uint64_t> bits{kUntouched};
    };
    std::atomic<std::uint64_t>& at(int i) { return ranges_[static_cast<std::size_t>(i)].bits; }

    std::vector<Rest> ranges_;
    alignas(kLine) std::atomic<int> n_left_{0};  // threads that have left the current op
};

}  // namespace entropykv
