// Products of quantised weights with f32 activations: what one instruction set offers for each type
// of weights, on the blocks of ggml as they lie in the mapped file. The kernels allocate nothing
// and know nothing of threads.
//
// Activations are rounded to 8 bits once, with one scale per 32 values (per 256 for ternary weights
// and the K types). What a row of weights gives for a token is the sum over its groups of weights,
// in their order, of (integer product) * (scale of the group * scale of the token there): every
// kernel computes exactly that, so a token gets the same bits whatever is read together with it.
//
// f16 weights are multiplied with activations as they are, in f32: value i of a row is added to
// sum i % 16, and those 16 are added up in one order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace entropykv {

enum class WeightType { q4_0, q4_1, q8_0, q4_k, q5_k, q6_k, tq1_0, tq2_0, q5_0, q5_1, f16 };
constexpr int kWeightTypes = 11;

// Rows of a matrix of weights: consecutive blocks each, `stride` bytes from one to the next.
struct WeightRows {
    const std::byte* data;
    std::size_t stride;
    int n_rows;
    int n_values;  // of a row: a multiple of the type's block
};

// Tokens as quantise() writes them, `stride` bytes from one to the next.
struct RoundedTokens {
    const std::byte* data;
    std::size_t stride;
    int n_tokens;
};

struct ProductKernels {
    // Bytes of a token of n_values after rounding.
    std::size_t (*token_bytes)(int n_values);
    void (*quantise)(const float* token, int n_values, std::byte* rounded);
    // Products of all rows with one token: out[row].
    void (*one)(const WeightRows&, const std::byte* token, float* out);
    // Products of at most `tile_rows` rows with at most kTileTokens tokens, at out[token *
    // out_stride
    // + row]; scratch: `tile_bytes`, aligned to 64.
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

// Those that this machine can run, the fastest last; none where it has neither AVX2 nor NEON.
std::vector<const ProductTable*> available_products();

}  // namespace entropykv
