"""Decide who computes products of quantised weights: the extension's kernels, or llama.cpp."""

from __future__ import annotations

import llama_cpp

from entropykv import _core


def serves_products() -> bool:
    """Tell whether the extension's kernels are to compute products.

    Where there is AMX or a device, those of llama.cpp are faster.
    """
    has_amx = b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()
    offloads = llama_cpp.llama_supports_gpu_offload()
    return bool(_core.product_kernels()) and not has_amx and not offloads


def reads_blocks() -> bool:
    """Tell whether all weights stay as they are in the file, for the extension's kernels.

    llama.cpp repacks some types while it loads them, for kernels of its own: that takes memory
    besides the file, and nobody else can read it. On ARM it may do so: nobody has timed those
    kernels against ours, and the types that are left are ours all the same.
    """
    is_arm = any(name.startswith("neon") for name in _core.product_kernels())
    return serves_products() and not is_arm
