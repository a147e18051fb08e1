#include "platform/bandwidth.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

namespace entropykv {
namespace {

// Returns the sum of all whole groups of 16 values. No addition has to wait for another one.
std::uint64_t sum_of(const std::uint64_t* values, std::size_t n) {
    constexpr std::size_t kSums = 16;
    std::uint64_t sums[kSums] = {};
    for (std::size_t i = 0; i + kSums <= n; i += kSums)
        for (std::size_t j = 0; j < kSums; ++j) sums[j] += values[i + j];
    std::uint64_t total = 0;
    for (const std::uint64_t part : sums) total += part;
    return total;
}

}  // namespace

double read_bandwidth(std::size_t bytes, int n_threads) {
    if (bytes < sizeof(std::uint64_t) || n_threads < 1)
        throw std::invalid_argument("a read needs bytes and threads");
    const std::vector<std::uint64_t> memory(bytes / sizeof(std::uint64_t), 1);
    const std::size_t part = memory.size() / static_cast<std::size_t>(n_threads);
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::atomic<std::uint64_t> total{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; ++t)
        threads.emplace_back([&, t] {
            ready.fetch_add(1);
            while (!go.load()) std::this_thread::yield();
            total += sum_of(memory.data() + static_cast<std::size_t>(t) * part, part);
        });
    while (ready.load() < n_threads) std::this_thread::yield();
    const auto start = std::chrono::steady_clock::now();
    go.store(true);
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    // Using the total keeps the compiler from removing the sums.
    if (total.load() == 0) throw std::logic_error("nothing was read");
    return static_cast<double>(part * static_cast<std::size_t>(n_threads) * sizeof(std::uint64_t)) /
           seconds.count();
}

}  // namespace entropykv
