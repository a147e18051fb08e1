// Lets the threads of an op wait for each other.
#pragma once

#if !defined(_WIN32)
#include <time.h>
#endif

#include <atomic>
#if defined(_WIN32)
#include <thread>
#endif

namespace entropykv {

// This many spins take about 0.1 ms, which is longer than waiting for a running thread takes. After
// that, the other thread probably has no core, and spinning would only keep one from it.
constexpr int kMostSpins = 4096;

// Pauses for a moment, as ggml's waiting threads do; yielding would give the core away for
// milliseconds.
inline void relax() {
#if defined(ENTROPYKV_X86)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Sleeps for a moment. The shortest sleep of Windows is a millisecond or more, so there it only
// lets other threads run.
inline void nap() noexcept {
#if defined(_WIN32)
    std::this_thread::yield();
#else
    constexpr timespec kNap{0, 50'000};
    nanosleep(&kNap, nullptr);
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
            nap();
        }
    }
}

inline void wait_for(const std::atomic<bool>& flag) noexcept {
    wait_until([&] { return flag.load(std::memory_order_acquire); });
}

}  // namespace entropykv
