#include "platform/instruction_sets.hpp"

#if defined(ENTROPYKV_X86)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>
#elif defined(__aarch64__) && defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif

namespace entropykv {

#if defined(ENTROPYKV_X86)
// __builtin_cpu_supports would do, but clang-cl does not link the library that it calls.
namespace {

struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

// Returns zeros for a leaf that the CPU does not have.
Registers cpuid(unsigned leaf, unsigned part) {
    Registers found;
    if (__get_cpuid_count(leaf, part, &found.a, &found.b, &found.c, &found.d) == 0) return {};
    return found;
}

constexpr bool has_bit(unsigned value, int bit) { return (value >> bit & 1u) != 0; }

// Tells whether the system keeps these registers when it switches threads.
bool system_keeps(unsigned registers) {
    if (!has_bit(cpuid(1, 0).c, 27))
        return false;  // OSXSAVE: the CPU has xgetbv, and the system allows xgetbv
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & registers) == registers;
}

constexpr unsigned kYmm = 0x06;

// macOS sets the bits of its 512-bit registers only when a thread uses them for the first time, so
// those bits say nothing there.
bool system_keeps_zmm() {
#if defined(__APPLE__)
    return system_keeps(kYmm);
#else
    return system_keeps(kYmm | 0xe0);
#endif
}

}  // namespace

bool has_avx2() {
    const unsigned first = cpuid(1, 0).c;
    const bool has_avx = has_bit(first, 28), has_fma = has_bit(first, 12);
    const bool has_f16c = has_bit(first, 29);
    return has_avx && has_fma && has_f16c && has_bit(cpuid(7, 0).b, 5) && system_keeps(kYmm);
}

bool has_avx_vnni() {
#if defined(ENTROPYKV_AVX_VNNI)
    const bool has_part = cpuid(7, 0).a >= 1;  // the leaf has a part 1
    return has_avx2() && has_part && has_bit(cpuid(7, 1).a, 4);
#else
    return false;
#endif
}

bool has_avx512() {
    const unsigned extended = cpuid(7, 0).b;
    const bool has_f = has_bit(extended, 16), has_dq = has_bit(extended, 17);
    const bool has_bw = has_bit(extended, 30), has_vl = has_bit(extended, 31);
    return has_avx2() && has_f && has_dq && has_bw && has_vl && system_keeps_zmm();
}

bool has_avx512_vnni() { return has_avx512() && has_bit(cpuid(7, 0).c, 11); }
#else
bool has_avx2() { return false; }
bool has_avx_vnni() { return false; }
bool has_avx512() { return false; }
bool has_avx512_vnni() { return false; }
#endif

bool has_neon_dot_products() {
#if defined(__aarch64__) && defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
    int has = 0;
    std::size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#elif defined(__aarch64__) && defined(_WIN32)
    constexpr DWORD kDotProducts = 43;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE of newer headers
    return IsProcessorFeaturePresent(kDotProducts) != 0;
#else
    return false;
#endif
}

}  // namespace entropykv
