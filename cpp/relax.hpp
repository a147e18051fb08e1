// How threads of an op wait for each other.
#pragma once

namespace entropykv {

// As ggml's threads do: to yield would give the core away for milliseconds.
inline void relax() {
#if defined(ENTROPYKV_X86)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

}  // namespace entropykv
