// Sums f16 weights times activations, with the same names on every instruction set: value i of a
// row is added to lane i % 16, and the lanes are always added up in the same order, so that all
// instruction sets give the same bits. Everything is in an unnamed namespace: see eight_rows.hpp.
// floats_at() and halves_at() load 16 values of f32 and f16. kFloatRows and kFloatTokens are the
// tile of rows and tokens whose sums fit into registers; sum_up() adds the lanes of each row of
// such a tile.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace entropykv {
namespace {

#if defined(__AVX2__)
inline const __m256i* as_256(const std::byte* p) { return reinterpret_cast<const __m256i*>(p); }
inline const __m128i* as_128(const std::byte* p) { return reinterpret_cast<const __m128i*>(p); }

// Adds the upper to the lower two of four sums of each of two rows. The lower half of the result
// belongs to `a`, the upper half to `b`.
inline __m128 fold_two(__m128 a, __m128 b) {
    return _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
}
#endif

#if defined(__AVX512F__)
constexpr int kFloatRows = 4, kFloatTokens = 6;
using Lanes = __m512;
inline Lanes no_lanes() { return _mm512_setzero_ps(); }
inline Lanes floats_at(const std::byte* p) { return _mm512_loadu_ps(p); }
inline Lanes halves_at(const std::byte* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(as_256(p)));
}
inline Lanes add_product(Lanes sums, Lanes a, Lanes b) { return _mm512_fmadd_ps(a, b, sums); }
inline __m128 fold(Lanes a) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline void sum_up(const Lanes (&rows)[kFloatRows], float* sums) {
    _mm_storeu_ps(sums, _mm_hadd_ps(fold_two(fold(rows[0]), fold(rows[1])),
                                    fold_two(fold(rows[2]), fold(rows[3]))));
}
#elif defined(__AVX2__)
constexpr int kFloatRows = 2, kFloatTokens = 3;
struct Lanes {
    __m256 lower, upper;
};
inline Lanes no_lanes() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes floats_at(const std::byte* p) {
    const auto* floats = reinterpret_cast<const float*>(p);
    return {_mm256_loadu_ps(floats), _mm256_loadu_ps(floats + 8)};
}
inline Lanes halves_at(const std::byte* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(as_128(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(as_128(p + 16)))};
}
inline Lanes add_product(Lanes sums, Lanes a, Lanes b) {
    return {_mm256_fmadd_ps(a.lower, b.lower, sums.lower),
            _mm256_fmadd_ps(a.upper, b.upper, sums.upper)};
}
inline __m128 fold(Lanes a) {
    const __m256 half = _mm256_add_ps(a.lower, a.upper);
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline void sum_up(const Lanes (&rows)[kFloatRows], float* sums) {
    const __m128 both = fold_two(fold(rows[0]), fold(rows[1]));
    _mm_storel_pi(reinterpret_cast<__m64*>(sums), _mm_hadd_ps(both, both));
}
#else
constexpr int kFloatRows = 2, kFloatTokens = 3;
struct Lanes {
    float32x4_t quarter[4];
};
inline Lanes no_lanes() {
    const float32x4_t none = vdupq_n_f32(0.0f);
    return {{none, none, none, none}};
}
inline Lanes floats_at(const std::byte* p) {
    const auto* floats = reinterpret_cast<const float*>(p);
    return {
        {vld1q_f32(floats), vld1q_f32(floats + 4), vld1q_f32(floats + 8), vld1q_f32(floats + 12)}};
}
inline Lanes halves_at(const std::byte* p) {
    const auto* halves = reinterpret_cast<const std::uint16_t*>(p);
    const float16x8_t a = vreinterpretq_f16_u16(vld1q_u16(halves));
    const float16x8_t b = vreinterpretq_f16_u16(vld1q_u16(halves + 8));
    return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)),
             vcvt_high_f32_f16(b)}};
}
inline Lanes add_product(Lanes sums, Lanes a, Lanes b) {
    for (int i = 0; i < 4; ++i)
        sums.quarter[i] = vfmaq_f32(sums.quarter[i], a.quarter[i], b.quarter[i]);
    return sums;
}
inline float32x4_t fold(Lanes a) {
    return vaddq_f32(vaddq_f32(a.quarter[0], a.quarter[2]), vaddq_f32(a.quarter[1], a.quarter[3]));
}
inline void sum_up(const Lanes (&rows)[kFloatRows], float* sums) {
    const float32x4_t a = fold(rows[0]), b = fold(rows[1]);
    const float32x4_t both = vaddq_f32(vcombine_f32(vget_low_f32(a), vget_low_f32(b)),
                                       vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
    vst1_f32(sums, vget_low_f32(vpaddq_f32(both, both)));
}
#endif

}  // namespace
}  // namespace entropykv
