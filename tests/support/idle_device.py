"""Provide a device that computes nothing, so that the time of a step on it is the host's alone.

It counts what makes a host wait, and can take a time for each wait, each copy and each node of a
graph. A compiler is needed; the structures are those of one version of ggml, as in
plain_memory_device.py.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp

from tests.support.rpc_device import LIBRARIES, library

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = ("c++", "-std=c++17", "-O2", "-shared", "-fPIC")
COUNTED = ("waits", "copies", "graphs", "nodes", "unused")


@functools.cache
def _idle_device() -> Any:
    """Compile and register the device, which stays until the process ends."""
    folder = Path(tempfile.mkdtemp())
    built = folder / "idle_device.so"
    include = Path(llama_cpp.__file__).parents[1] / "include"
    if not include.is_dir():
        include = Path(llama_cpp.__file__).parent / "include"
    base = min(LIBRARIES.glob("libggml-base.so.*"), key=lambda path: len(path.name))
    subprocess.run(
        [*COMPILER, f"-I{include}", str(SOURCE), str(base), "-o", str(built)], check=True
    )
    device = ctypes.CDLL(str(built))
    device.set_cost.argtypes = (ctypes.c_int64, ctypes.c_int64)
    device.use_idle_device(library("ggml").ggml_backend_register)
    built.unlink()
    folder.rmdir()
    return device


def use_idle_device(cost_seconds: float = 0.0, node_seconds: float = 0.0) -> None:
    """Register the device in this process, for models that are loaded afterwards.

    A wait and a copy take `cost_seconds` each, and the device is busy for `node_seconds` with every
    node.
    """
    _idle_device().set_cost(int(1e9 * cost_seconds), int(1e9 * node_seconds))


def counted() -> dict[str, int]:
    """Return the counts so far, by name.

    They are waits for new work, copies from and to the host, graphs, nodes in them that compute
    something, and the nanoseconds in which the device had nothing to do between two graphs.
    """
    values = (ctypes.c_int64 * len(COUNTED))()
    _idle_device().read_counts(values)
    return dict(zip(COUNTED, values, strict=True))
