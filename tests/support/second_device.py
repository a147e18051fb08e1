"""Provide a second device for layers: that of CUDA or Vulkan if llama.cpp was built with it, or
else RPC's.

On a machine without a GPU, Mesa's lavapipe computes what Vulkan is asked for.
"""

from __future__ import annotations

import ctypes

from tests.support.rpc_device import LIBRARIES, built_with_rpc, library, use_rpc_device


def second_device() -> str | None:
    """Return the name of the device; None if llama.cpp was built for the CPU alone."""
    for backend in ("CUDA", "Vulkan"):
        if any(LIBRARIES.glob(f"libggml-{backend.lower()}.*")):
            return f"{backend}0"
    return "RPC0" if built_with_rpc() else None


def use_second_device() -> None:
    """Let models that are loaded afterwards use the device, if there is one."""
    if second_device() == "RPC0":
        use_rpc_device()


def is_lavapipe() -> bool:
    """Tell whether the CPU computes what Vulkan is asked for."""
    name = second_device()
    if name is None or not name.startswith("Vulkan"):
        return False
    ggml = library("ggml")
    ggml.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    base = library("ggml-base")
    base.ggml_backend_dev_description.restype = ctypes.c_char_p
    base.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
    device = ggml.ggml_backend_dev_by_name(name.encode())
    return device is not None and b"llvmpipe" in base.ggml_backend_dev_description(device)
