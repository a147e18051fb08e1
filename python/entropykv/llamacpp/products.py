"""Decide whether the extension's kernels or llama.cpp compute products of quantised weights."""

from __future__ import annotations

import llama_cpp

from entropykv import _core


def serves_products() -> bool:
    """Tell whether the extension's kernels compute products.

    On a machine with AMX or a device, the kernels of llama.cpp are faster.
    """
    has_amx = b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()
    offloads = llama_cpp.llama_supports_gpu_offload()
    return bool(_core.product_kernels()) and not has_amx and not offloads


def reads_blocks() -> bool:
    """Tell whether all weights stay in the file's layout, which the extension's kernels need.

    llama.cpp repacks some types for its own kernels while it loads them: this takes memory in
    addition to the file, and only llama.cpp can read the result. On ARM repacking is allowed,
    because its kernels have not been compared with ours there; ours still compute the other types.
    """
    is_arm = any(name.startswith("neon") for name in _core.product_kernels())
    return serves_products() and not is_arm
