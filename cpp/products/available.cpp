#include "platform/instruction_sets.hpp"
#include "products/product_kernels.hpp"

namespace entropykv {

std::vector<const ProductTable*> available_products() {
    std::vector<const ProductTable*> tables;
#if defined(ENTROPYKV_X86)
    if (has_avx2()) tables.push_back(&kProductsAvx2);
#if defined(ENTROPYKV_AVX_VNNI)
    if (has_avx_vnni()) tables.push_back(&kProductsAvxVnni);
#endif
    if (has_avx512_vnni()) tables.push_back(&kProductsAvx512Vnni);
#elif defined(ENTROPYKV_ARM64)
    tables.push_back(&kProductsNeon);
    if (has_neon_dot_products()) tables.push_back(&kProductsNeonDot);
#endif
    return tables;
}

}  // namespace entropykv
