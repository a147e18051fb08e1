// One vector of floats per instruction set, behind the same names. The kernels are written once
// against it; CMake compiles them once per instruction set. Everything lives in an unnamed
// namespace, so that no function built for one instruction set is ever linked into another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace entropykv {
namespace {

inline float half_to_float(std::uint16_t half) {
    const std::uint32_t shifted = (half & 0x7fffu) << 13;
    float magnitude;
    std::memcpy(&magnitude, &shifted, sizeof magnitude);
    magnitude *= 0x1p112f;  // moves the exponent bias of f16 to that of f32; subnormals included
    std::uint32_t bits;
    std::memcpy(&bits, &magnitude, sizeof bits);
    bits |= static_cast<std::uint32_t>(half & 0x8000u) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::uint16_t float_to_half(float value) {
    // Round to nearest even, saturating to the largest finite f16: an infinity in the store would
    // turn every later attention row into NaN.
    constexpr float largest = 65504.0f;
    value = value > largest ? largest : value < -largest ? -largest : value;
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    float absolute;
    std::memcpy(&absolute, &magnitude, sizeof absolute);
    if (absolute < 0x1p-14f) {
        const float steps = absolute * 0x1p24f + 0x1p23f;  // adding 2^23 rounds to an integer
        std::uint32_t rounded;
        std::memcpy(&rounded, &steps, sizeof rounded);
        return static_cast<std::uint16_t>(sign | (rounded & 0x7ffu));
    }
    const std::uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<std::uint16_t>(sign | ((magnitude + 0xfffu + odd - 0x38000000u) >> 13));
}

#if defined(__AVX512F__)

constexpr int kLanes = 16;
constexpr int kRowVectors = 4;  // row vectors per register block of the prompt kernel
struct Vec {
    __m512 v;
};
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec load_half(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_half(std::uint16_t* p, Vec a) {
    const __m512 limit = _mm512_set1_ps(65504.0f);
    const __m512 finite =
        _mm512_max_ps(_mm512_min_ps(a.v, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(finite, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec load_int8(const std::int8_t* p) {
    return {_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec maximum(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline bool any_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ) != 0; }
inline Vec round_nearest(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec scale_by_power(Vec a, Vec power) { return {_mm512_scalef_ps(a.v, power.v)}; }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
    const __m512 abcd =
        _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#elif defined(__AVX2__)

constexpr int kLanes = 8;
constexpr int kRowVectors = 2;
struct Vec {
    __m256 v;
};
inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline Vec load_half(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store_half(std::uint16_t* p, Vec a) {
    const __m256 limit = _mm256_set1_ps(65504.0f);
    const __m256 finite =
        _mm256_max_ps(_mm256_min_ps(a.v, limit), _mm256_sub_ps(_mm256_setzero_ps(), limit));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(finite, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec load_int8(const std::int8_t* p) {
    return {_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec maximum(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline bool any_less(Vec a, Vec b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)) != 0;
}
inline Vec round_nearest(Vec a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec scale_by_power(Vec a, Vec power) {
    const __m256i exponent = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(power.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
}
inline void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
    const __m256 ab = _mm256_hadd_ps(a.v, b.v);
    const __m256 cd = _mm256_hadd_ps(c.v, d.v);
    const __m256 abcd = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}
inline float sum(Vec a) {
    float out[4];
    sum4(a, a, a, a, out);
    return out[0];
}
inline float largest(Vec a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

#else  // compiler vectors: SSE2 on x86-64, NEON on AArch64

constexpr int kLanes = 4;
constexpr int kRowVectors = 2;
typedef float FloatLanes __attribute__((vector_size(16)));
typedef std::int32_t IntLanes __attribute__((vector_size(16)));
struct Vec {
    FloatLanes v;
};
inline Vec zero() { return {FloatLanes{}}; }
inline Vec broadcast(float x) { return {FloatLanes{} + x}; }
inline Vec load(const float* p) {
    Vec a;
    std::memcpy(&a.v, p, sizeof a.v);
    return a;
}
inline void store(float* p, Vec a) { std::memcpy(p, &a.v, sizeof a.v); }
inline Vec load_half(const std::uint16_t* p) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = half_to_float(p[i]);
    return load(lanes);
}
inline void store_half(std::uint16_t* p, Vec a) {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(a.v[i]);
}
inline Vec load_int8(const std::int8_t* p) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(p[i]);
    return load(lanes);
}
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec maximum(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return {a.v < b.v ? yes.v : no.v}; }
inline bool any_less(Vec a, Vec b) {
    const IntLanes less = a.v < b.v;
    for (int i = 0; i < kLanes; ++i)
        if (less[i] != 0) return true;
    return false;
}
inline Vec round_nearest(Vec a) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    return {(a.v + magic) - magic};
}
inline Vec scale_by_power(Vec a, Vec power) {
    const IntLanes exponent = (__builtin_convertvector(power.v, IntLanes) + 127) << 23;
    FloatLanes factor;
    std::memcpy(&factor, &exponent, sizeof factor);
    return {a.v * factor};
}
inline float sum(Vec a) {
    float total = 0.0f;
    for (int i = 0; i < kLanes; ++i) total += a.v[i];
    return total;
}
inline float largest(Vec a) {
    float best = a.v[0];
    for (int i = 1; i < kLanes; ++i) best = a.v[i] > best ? a.v[i] : best;
    return best;
}
inline void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
}

#endif

inline float half_scale(const std::uint16_t* p) {
#if defined(__F16C__)
    return _cvtsh_ss(*p);
#else
    return half_to_float(*p);
#endif
}

// e^x for x <= 88, relative error about 1e-7 (Cephes' polynomial); exactly 0 below -87.
inline Vec exponential(Vec x) {
    const Vec bounded = maximum(x, broadcast(-87.0f));
    const Vec power = round_nearest(bounded * broadcast(1.44269504f));
    Vec r = multiply_add(power, broadcast(-0.693359375f), bounded);
    r = multiply_add(power, broadcast(2.12194440e-4f), r);
    Vec p = broadcast(1.9875691500e-4f);
    p = multiply_add(p, r, broadcast(1.3981999507e-3f));
    p = multiply_add(p, r, broadcast(8.3334519073e-3f));
    p = multiply_add(p, r, broadcast(4.1665795894e-2f));
    p = multiply_add(p, r, broadcast(1.6666665459e-1f));
    p = multiply_add(p, r, broadcast(5.0000001201e-1f));
    p = multiply_add(p, r * r, r + broadcast(1.0f));
    return where_less(x, broadcast(-87.0f), zero(), scale_by_power(p, power));
}

// cap * tanh(x / cap), as gemma2's logit soft-cap.
inline Vec soft_cap(Vec x, float cap) {
    Vec twice = x * broadcast(2.0f / cap);
    const Vec limit = broadcast(20.0f);  // tanh is 1 in float from 10 on
    twice = where_less(limit, twice, limit, twice);
    const Vec e = exponential(twice);
    const Vec one = broadcast(1.0f);
    return broadcast(cap) * ((e - one) / (e + one));
}

}  // namespace
}  // namespace entropykv
