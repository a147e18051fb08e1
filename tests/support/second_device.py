"""Provide a second device for layers: CUDA or Vulkan if llama.cpp was built with it, or else RPC.

On a machine without a GPU, Mesa's lavapipe computes for Vulkan.
"""

from __future__ import annotations

from tests.support.rpc_device import LIBRARIES, built_with_rpc, use_rpc_device


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
