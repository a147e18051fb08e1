// Lets the threads of an op wait for each other.
#pragma once

#include <time.h>

#include <atomic>

namespace entropykv {

// This takes about 0.1 ms, which is longer than any wait for a running thread. After that, the
// other thread probably has no core, and spinning would only keep one from it.
constexpr int kMostSpins = 4096;
constexpr timespec kNap{0, 50'000};

// Does what ggml's threads do; yielding would give the core away for milliseconds.
inline void relax() {
#if defined(ENTROPYKV_X86)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Waits until done() returns true: spins at first, then sleeps between calls.
template <class Done>
void wait_until(const Done& done) noexcept {
    int spins = 0;
    while (!done()) {
        if (spins < kMostSpins) {
            relax();
            ++spins;
        } else {
            nanosleep(&kNap, nullptr);
        }
    }
}

// Waits until another thread sets a flag.
inline void wait_for(const std::atomic<bool>& flag) noexcept {
    wait_until([&] { return flag.load(std::memory_order_acquire); });
}

}  // namespace entropykv
