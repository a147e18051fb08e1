// Declares the products of quantised weights with f32 activations that one instruction set offers
// for each type of weights. They read ggml's blocks as they lie in the mapped file, allocate
// nothing, and know nothing of threads.
// Activations are rounded to 8 bits once, with one scale per 32 values (per 256 for ternary weights
// and the K types). The product of a row of weights and a token is the sum over its groups of
// weights, in their order, of (integer product) * (scale of the group * scale of the token there).
// Every kernel computes exactly that, so a token gets the same bits whatever is read together with
// it.
// f16 weights are multiplied with activations that are not rounded, in f32: value i of a row is
// added to sum i % 16, and those 16 sums are always added up in the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace entropykv {

enum class WeightType { q4_0, q4_1, q8_0, q4_k, q5_k, q6_k, tq1_0, tq2_0, q5_0, q5_1, f16 };
constexpr int kWeightTypes = 11;

// Refers to rows of a matrix of weights: each is consecutive blocks, and they are `stride` bytes
// apart.
struct WeightRows {
    const std::byte* data;
    std::size_t stride;
    int n_rows;
    int n_values;  // a multiple of the type's block
};

// Refers to tokens as quantise() writes them, `stride` bytes apart.
struct RoundedTokens {
    const std::byte* data;
    std::size_t stride;
    int n_tokens;
};

struct ProductKernels {
    // Returns the bytes of a token of n_values values after rounding.
    std::size_t (*token_bytes)(int n_values);
    void (*quantise)(const float* token, int n_values, std::byte* rounded);
    // Computes the products of all rows with one token: out[row].
    void (*one)(const WeightRows&, const std::byte* token, float* out);
    // Computes the products of at most `tile_rows` rows with at most kTileTokens tokens, at
    // out[token * out_stride + row]. scratch: `tile_bytes` bytes, aligned to 64.
    void (*many)(const WeightRows&, const RoundedTokens&, std::byte* scratch, float* out,
                 std::size_t out_stride);
};

constexpr int kTileTokens = 256;

struct ProductTable {
    const char* name;
    int tile_rows;
    std::size_t tile_bytes;
    ProductKernels types[kWeightTypes];

    const ProductKernels& of(WeightType type) const { return types[static_cast<int>(type)]; }
};

#if defined(ENTROPYKV_X86)
extern const ProductTable kProductsAvx2;
extern const ProductTable kProductsAvxVnni;
extern const ProductTable kProductsAvx512Vnni;
#elif defined(ENTROPYKV_ARM64)
extern const ProductTable kProductsNeon;
extern const ProductTable kProductsNeonDot;
#endif

// Returns the tables that this machine can run, the fastest last; none if it has neither AVX2 nor
// NEON.
std::vector<const ProductTable*> available_products();

}  // namespace entropykv
