// Computes products of a few tokens by llama.cpp's own kernel, each token on its own: its bits do
// not depend on the others. llama.cpp itself takes another kernel for several tokens.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <vector>

#include "platform/aligned_bytes.hpp"

namespace entropykv {

class TokenProducts {
public:
    // Tells whether llama.cpp's kernels can be called.
#if defined(ENTROPYKV_GGML_CPU)
    static constexpr bool kPossible = true;
#else
    static constexpr bool kPossible = false;
#endif
    // At most n_threads threads take part in an op.
    explicit TokenProducts(int n_threads) : rounded_(static_cast<std::size_t>(n_threads)) {}
    TokenProducts(const TokenProducts&) = delete;
    TokenProducts& operator=(const TokenProducts&) = delete;

    // Makes a node that multiplies a matrix with tokens compute it here. This object must live as
    // long as the context. Throws std::bad_alloc.
    void take(ggml_tensor* node);
    std::size_t scratch_bytes() const;

    // Computes such a node, as ggml calls it.
    static void multiply_op(ggml_tensor* node, int thread, int n_threads, void* user_data);

private:
    std::vector<AlignedBytes> rounded_;  // the tokens, for each thread
};

}  // namespace entropykv
