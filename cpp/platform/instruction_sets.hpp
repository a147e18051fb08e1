// Tells what the CPU supports, that is, which of the compiled kernels may be called.
#pragma once

namespace entropykv {

bool has_avx2();      // requires FMA and F16C, too
bool has_avx_vnni();  // requires AVX2, too
bool has_avx512();    // requires F, BW, VL and DQ
bool has_avx512_vnni();
bool has_neon_dot_products();

}  // namespace entropykv
