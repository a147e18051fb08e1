// Defines the kernels of products of one instruction set. CMake compiles this file once for each.
#include "products/product_kernels.hpp"

#include "products/block_types.hpp"
#include "products/half_rows.hpp"
#include "products/many_tokens.hpp"

namespace entropykv {
namespace {

template <class Type>
constexpr ProductKernels kernels_of() {
    return {token_bytes<Type>, quantise<Type>, one_token<Type>, many_tokens<Type>};
}

constexpr ProductKernels half_kernels() {
    return {float_token_bytes, copy_token, one_half_token, many_half_tokens};
}

}  // namespace

#if defined(__AVX512VNNI__)
#define ENTROPYKV_PRODUCTS kProductsAvx512Vnni
constexpr const char kName[] = "avx512vnni";
#elif defined(__AVXVNNI__)
#define ENTROPYKV_PRODUCTS kProductsAvxVnni
constexpr const char kName[] = "avxvnni";
#elif defined(__AVX2__)
#define ENTROPYKV_PRODUCTS kProductsAvx2
constexpr const char kName[] = "avx2";
#elif defined(__ARM_FEATURE_DOTPROD)
#define ENTROPYKV_PRODUCTS kProductsNeonDot
constexpr const char kName[] = "neondot";
#else
#define ENTROPYKV_PRODUCTS kProductsNeon
constexpr const char kName[] = "neon";
#endif

const ProductTable ENTROPYKV_PRODUCTS{
    kName,
    kTileRows,
    kTileBytes,
    // The order is that of WeightType.
    {kernels_of<Q4_0>(), kernels_of<Q4_1>(), kernels_of<Q8_0>(), kernels_of<Q4_K>(),
     kernels_of<Q5_K>(), kernels_of<Q6_K>(), kernels_of<TQ1_0>(), kernels_of<TQ2_0>(),
     kernels_of<Q5_0>(), kernels_of<Q5_1>(), half_kernels()}};

}  // namespace entropykv
