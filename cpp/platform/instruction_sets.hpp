// Tells what the CPU supports, that is, which of the compiled kernels may be called.
#pragma once

namespace entropykv {

bool has_avx2();      // with FMA and F16C
bool has_avx_vnni();  // with AVX2
bool has_avx512();    // F, BW, VL and DQ
bool has_avx512_vnni();
bool has_neon_dot_products();

}  // namespace entropykv
