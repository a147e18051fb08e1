"""Provide a second backend on any machine: llama.cpp's RPC device, served by a local process.

llama.cpp treats it as a GPU: its buffers cannot be read from the CPU, and the scheduler copies
between the two. Requires a llama-cpp-python built with GGML_RPC (`make test-device`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp

LIBRARIES = Path(llama_cpp.__file__).parent / "lib"
_DEVICE_CPU = 0  # The value of GGML_BACKEND_DEVICE_TYPE_CPU.


def built_with_rpc() -> bool:
    """Tell whether this llama-cpp-python has the RPC backend."""
    return any(LIBRARIES.glob("libggml-rpc.*"))


def library(name: str) -> Any:
    """Load a library of ggml by its name, such as ggml-rpc.

    A wheel has copies instead of links. Only the file with a version in its name, which libllama
    itself loads, has the list of devices that llama.cpp looks at.
    """
    numbered = sorted(LIBRARIES.glob(f"lib{name}.so.*"), key=lambda path: len(path.name))
    return ctypes.CDLL(str(numbered[0] if numbered else next(LIBRARIES.glob(f"lib{name}.*"))))


def serve(port: int) -> None:
    """Serve computations on the CPU for any client, until the process ends."""
    by_type = library("ggml").ggml_backend_dev_by_type
    by_type.restype = ctypes.c_void_p
    device = (ctypes.c_void_p * 1)(by_type(_DEVICE_CPU))
    start = library("ggml-rpc").ggml_backend_rpc_start_server
    start.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    start(f"127.0.0.1:{port}".encode(), None, 1, 1, device)


@functools.cache
def use_rpc_device() -> None:
    """Register a device in this process, which models that are loaded afterwards may use.

    It stays until the process ends, because llama.cpp cannot forget a device.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", f"from tests.support.rpc_device import serve; serve({port})"]
    )
    atexit.register(server.kill)
    _wait_for(port, server)
    add = library("ggml-rpc").ggml_backend_rpc_add_server
    add.restype = ctypes.c_void_p
    register = library("ggml").ggml_backend_register
    register.argtypes = (ctypes.c_void_p,)
    register(add(f"127.0.0.1:{port}".encode()))


def _wait_for(port: int, server: subprocess.Popen[bytes], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise AssertionError("the RPC server does not answer")
