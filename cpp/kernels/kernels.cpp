// Defines the kernels of one instruction set. CMake compiles this file once for each; simd.hpp
// picks the vector type from the flags of the compiler.
#include "kernels/kernels.hpp"

#include "kernels/kernel_decode_f16.hpp"
#include "kernels/kernel_decode_q8.hpp"
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
        case KvType::q8_0: return decode_q8_0(task);
    }
}

}  // namespace

#if defined(__AVX512VNNI__)
const KernelTable kKernelsAvx512Vnni{"avx512vnni", store_k,     store_v,         move_keys,
                                     decode,       prompt,      prompt_observe,  logits_observe,
                                     value_norms,  products,    sketch_products, log_sum,
                                     features,     predict_key, predict_value,   add_products};
#elif defined(__AVX512F__)
const KernelTable kKernelsAvx512{"avx512",    store_k,     store_v,         move_keys,
                                 decode,      prompt,      prompt_observe,  logits_observe,
                                 value_norms, products,    sketch_products, log_sum,
                                 features,    predict_key, predict_value,   add_products};
#elif defined(__AVX2__)
const KernelTable kKernelsAvx2{"avx2",      store_k,     store_v,         move_keys,
                               decode,      prompt,      prompt_observe,  logits_observe,
                               value_norms, products,    sketch_products, log_sum,
                               features,    predict_key, predict_value,   add_products};
#elif defined(ENTROPYKV_NEON)
const KernelTable kKernelsNeon{"neon",      store_k,     store_v,         move_keys,
                               decode,      prompt,      prompt_observe,  logits_observe,
                               value_norms, products,    sketch_products, log_sum,
                               features,    predict_key, predict_value,   add_products};
#else
const KernelTable kKernelsPortable{"portable",  store_k,     store_v,         move_keys,
                                   decode,      prompt,      prompt_observe,  logits_observe,
                                   value_norms, products,    sketch_products, log_sum,
                                   features,    predict_key, predict_value,   add_products};
#endif

}  // namespace entropykv
