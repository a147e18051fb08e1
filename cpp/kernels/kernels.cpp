// Defines the kernels of one instruction set. CMake compiles this file once for each; simd.hpp
// picks the vector type from the flags of the compiler.
#include "kernels/kernels.hpp"

#include "kernels/kernel_decode.hpp"
#include "kernels/kernel_features.hpp"
#include "kernels/kernel_observe.hpp"
#include "kernels/kernel_prompt.hpp"
#include "kernels/kernel_scores.hpp"
#include "kernels/kernel_sketch.hpp"
#include "kernels/kernel_store.hpp"

namespace entropykv {
namespace {

void decode(const DecodeTask& task) {
    switch (task.entries.layout->type) {
        case KvType::f16: return decode_f16(task);
        case KvType::q8_0: return decode_bytes<KvType::q8_0>(task);
        case KvType::q8_0_iq4_nl: return decode_bytes<KvType::q8_0_iq4_nl>(task);
    }
}

}  // namespace

#if defined(__AVX512VNNI__)
#define ENTROPYKV_KERNELS kKernelsAvx512Vnni
constexpr const char kName[] = "avx512vnni";
#elif defined(__AVX512F__)
#define ENTROPYKV_KERNELS kKernelsAvx512
constexpr const char kName[] = "avx512";
#elif defined(__AVX2__)
#define ENTROPYKV_KERNELS kKernelsAvx2
constexpr const char kName[] = "avx2";
#elif defined(ENTROPYKV_NEON)
#define ENTROPYKV_KERNELS kKernelsNeon
constexpr const char kName[] = "neon";
#else
#define ENTROPYKV_KERNELS kKernelsPortable
constexpr const char kName[] = "portable";
#endif

const KernelTable ENTROPYKV_KERNELS{
    kName,   store_k,        store_v,        rotate,        move_keys,   decode,
    prompt,  prompt_observe, logits_observe, value_norms,   products,    sketch_products,
    log_sum, features,       predict_key,    predict_value, add_products};

}  // namespace entropykv
