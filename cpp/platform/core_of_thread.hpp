// Lets a thread see on which core it runs, and leave it. Only Linux can do this; elsewhere, nothing
// is known and nothing happens.
#pragma once

#if defined(__linux__)
#include <sched.h>
#endif

#include <cstdint>

namespace entropykv {

// Has a bit for every core with a number below 64; the others are not looked at.
using CoreSet = std::uint64_t;

// Returns the core of the calling thread; empty if it is unknown or above 63.
inline CoreSet own_core() noexcept {
#if defined(__linux__)
    const int core = sched_getcpu();
    return core >= 0 && core < 64 ? CoreSet{1} << core : 0;
#else
    return 0;
#endif
}

// Keeps the cores on which a thread may run, and forbids it some of them.
class AllowedCores {
public:
    // Takes the cores that the calling thread may use now.
    AllowedCores() noexcept {
#if defined(__linux__)
        known_ = sched_getaffinity(0, sizeof allowed_, &allowed_) == 0;
#endif
    }
    // Lets the calling thread, which made this object, run on the cores that it could use then,
    // except `cores`. If none would be left, nothing changes.
    void avoid(CoreSet cores) const noexcept {
#if defined(__linux__)
        if (!known_) return;
        cpu_set_t left = allowed_;
        for (int core = 0; core < 64; ++core)
            if ((cores >> core & 1) != 0) CPU_CLR(core, &left);
        if (CPU_COUNT(&left) > 0) sched_setaffinity(0, sizeof left, &left);
#else
        static_cast<void>(cores);
#endif
    }

private:
#if defined(__linux__)
    cpu_set_t allowed_;
    bool known_ = false;
#endif
};

}  // namespace entropykv
