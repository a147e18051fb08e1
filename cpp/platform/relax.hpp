// How threads of an op wait for each other.
#pragma once

#include <time.h>

#include <atomic>

namespace entropykv {

// About 0.1 ms: longer than any wait for a thread that is running. One that waits longer waits for
// a thread that has no core, and would only keep one from it.
constexpr int kMostSpins = 4096;
constexpr timespec kNap{0, 50'000};

// As ggml's threads do: to yield would give the core away for milliseconds.
inline void relax() {
#if defined(ENTROPYKV_X86)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Waits until another thread has done something: spinning at first, then sleeping between looks.
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
