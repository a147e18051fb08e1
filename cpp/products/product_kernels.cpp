// The kernels of products of one instruction set. CMake compiles this file once for each.
#include "products/product_kernels.hpp"

#include "products/block_types.hpp"
#include "products/block_types_k.hpp"
#include "products/many_tokens.hpp"

namespace entropykv {
namespace {

template <class Type>
constexpr ProductKernels kernels_of() {
    return {Type::kGroup, token_bytes<Type>, quantise<Type>, one_token<Type>, many_tokens<Type>};
}

}  // namespace

#if defined(__AVX512VNNI__)
const ProductTable kProductsAvx512Vnni {
    "avx512vnni",
#else
const ProductTable kProductsAvx2{
    "avx2",
#endif
        kTileRows, kTileBytes,
        // In the order of WeightType.
        {
        kernels_of<Q4_0>(), kernels_of<Q4_1>(), kernels_of<Q8_0>(), kernels_of<Q4_K>(),
            kernels_of<Q5_K>(), kernels_of<Q6_K>(), kernels_of<TQ1_0>(), kernels_of<TQ2_0>()
    }
};

}  // namespace entropykv
