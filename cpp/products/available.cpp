#include "products/product_kernels.hpp"

namespace entropykv {

std::vector<const ProductTable*> available_products() {
    std::vector<const ProductTable*> tables;
#if defined(ENTROPYKV_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        tables.push_back(&kProductsAvx2);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vnni"))
            tables.push_back(&kProductsAvx512Vnni);
    }
#endif
    return tables;
}

}  // namespace entropykv
