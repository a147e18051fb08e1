"""Who computes products of quantised weights: kernels of the extension, or llama.cpp."""

from __future__ import annotations

import llama_cpp

from entropykv import _core


def reads_blocks() -> bool:
    """Whether the extension's kernels are to read weights as they are in the file.

    llama.cpp repacks some types while it loads them, for kernels of its own: that takes memory
    besides the file, and nobody else can read it. Where there is AMX or a device, they are faster.
    """
    has_amx = b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()
    offloads = llama_cpp.llama_supports_gpu_offload()
    return bool(_core.product_kernels()) and not has_amx and not offloads
