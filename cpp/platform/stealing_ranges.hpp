// Deals numbered pieces of work out to threads: each gets a range of consecutive pieces, and one
// that has finished its own takes pieces from the ends of the others' ranges.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace entropykv {

class StealingRanges {
public:
    explicit StealingRanges(int n_threads) : ranges_(static_cast<std::size_t>(n_threads)) {}

    // Deals out pieces [0, n_pieces) to threads [0, n_threads); none of them may be taking any.
    void deal(int n_pieces, int n_threads) noexcept {
        const auto bound = [&](int thread) {
            return static_cast<std::uint64_t>(std::int64_t{n_pieces} * thread / n_threads);
        };
        for (int i = 0; i < n_threads; ++i)
            at(i).store(bound(i) << kBits | bound(i + 1), std::memory_order_relaxed);
    }

    // Returns the next piece of a thread's own range, or the last one of another's; -1: none.
    int take(int thread, int n_threads) noexcept {
        for (int i = 0; i < n_threads; ++i) {
            const bool own = i == 0;
            std::atomic<std::uint64_t>& range = at((thread + i) % n_threads);
            std::uint64_t old = range.load(std::memory_order_relaxed);
            while (first_of(old) < last_of(old)) {
                const std::uint64_t rest = own ? old + (std::uint64_t{1} << kBits) : old - 1;
                if (range.compare_exchange_weak(old, rest, std::memory_order_relaxed))
                    return static_cast<int>(own ? first_of(old) : last_of(old) - 1);
            }
        }
        return -1;
    }

private:
    static constexpr int kBits = 32;
    static constexpr std::size_t kLine = 64;
    static std::uint64_t first_of(std::uint64_t range) { return range >> kBits; }
    static std::uint64_t last_of(std::uint64_t range) { return range & 0xffffffffu; }

    // Holds the first piece of a range in the upper half, and the one after its last in the lower.
    struct alignas(kLine) Range {
        std::atomic<std::uint64_t> bounds{0};
    };
    std::atomic<std::uint64_t>& at(int i) { return ranges_[static_cast<std::size_t>(i)].bounds; }

    std::vector<Range> ranges_;
};

}  // namespace entropykv
