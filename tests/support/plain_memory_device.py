"""Define a ggml device that works in plain memory, like BLAS; tests run it in a process of its own.

It accepts products of 32 tokens and more, and lets llama.cpp's CPU backend compute them. Every
other operation that it gets ends the process, as in ggml-blas. The structures are those of ggml's
header ggml-backend-impl.h, which may change between releases of llama.cpp; GGML_VERSION names the
version they belong to.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import llama_cpp

GGML_VERSION = "0.25.3"
LEAST_TOKENS = 32
LEAST_VALUES = 32  # The device takes products only if rows have at least this many values.

# ggml_backend_dev_type: 0 is a CPU, 1 a GPU, 2 an integrated GPU, 3 an accelerator.
_ACCELERATOR = 3
_CPU = 0
_FAILED = -1
_VIEWS = {b"NONE", b"RESHAPE", b"VIEW", b"PERMUTE", b"TRANSPOSE"}
# A callback of Python cannot return a string, whose memory would be freed, so it returns an
# address.
_OF_NAME = CFUNCTYPE(c_void_p, c_void_p)
_OF_TYPE = CFUNCTYPE(c_int, c_void_p)
_OF_PROPERTIES = CFUNCTYPE(None, c_void_p, c_void_p)
_OF_BACKEND = CFUNCTYPE(c_void_p, c_void_p, c_char_p)
_OF_BUFFER_TYPE = CFUNCTYPE(c_void_p, c_void_p)
_OF_SUPPORT = CFUNCTYPE(c_bool, c_void_p, c_void_p)
_OF_COMPUTING = CFUNCTYPE(c_int, c_void_p, c_void_p)


class _Device(ctypes.Structure):
    _fields_ = (
        ("get_name", _OF_NAME),
        ("get_description", _OF_NAME),
        ("get_memory", CFUNCTYPE(None, c_void_p, POINTER(c_size_t), POINTER(c_size_t))),
        ("get_type", _OF_TYPE),
        ("get_props", _OF_PROPERTIES),
        ("init_backend", _OF_BACKEND),
        ("get_buffer_type", _OF_BUFFER_TYPE),
        ("get_host_buffer_type", c_void_p),
        ("buffer_from_host_ptr", c_void_p),
        ("supports_op", _OF_SUPPORT),
        ("supports_buft", _OF_SUPPORT),
        ("offload_op", c_void_p),
        ("events", c_void_p * 3),
        ("reg", c_void_p),
        ("context", c_void_p),
    )


class _Backend(ctypes.Structure):
    _fields_ = (
        ("guid", c_void_p),
        ("get_name", _OF_NAME),
        ("free", CFUNCTYPE(None, c_void_p)),
        ("tensors_and_plans", c_void_p * 10),
        ("graph_compute", _OF_COMPUTING),
        ("events_and_optimizing", c_void_p * 3),
        ("device", c_void_p),
        ("context", c_void_p),
    )


class _Registry(ctypes.Structure):
    _fields_ = (
        ("api_version", c_int),
        ("get_name", _OF_NAME),
        ("get_device_count", CFUNCTYPE(c_size_t, c_void_p)),
        ("get_device", CFUNCTYPE(c_void_p, c_void_p, c_size_t)),
        ("get_proc_address", c_void_p),
        ("context", c_void_p),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("description", c_char_p),
        ("memory_free", c_size_t),
        ("memory_total", c_size_t),
        ("type", c_int),
    )


class Tensor(ctypes.Structure):
    """Define the first fields of a ggml_tensor."""

    _fields_ = (
        ("type", c_int),
        ("buffer", c_void_p),
        ("ne", c_int64 * 4),
        ("nb", c_size_t * 4),
        ("op", c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", c_void_p * 10),
    )


def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Return the libraries with ggml's functions of backends and of graphs."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    registry = ctypes.CDLL(str(folder / "libggml.so.0"))
    base = ctypes.CDLL(str(folder / "libggml-base.so.0"))
    registry.ggml_backend_init_by_type.restype = c_void_p
    registry.ggml_backend_init_by_type.argtypes = [c_int, c_char_p]
    registry.ggml_backend_device_register.argtypes = [c_void_p]
    registry.ggml_backend_dev_by_name.restype = c_void_p
    registry.ggml_backend_dev_by_name.argtypes = [c_char_p]
    base.ggml_version.restype = c_char_p
    base.ggml_op_name.restype = c_char_p
    base.ggml_backend_cpu_buffer_type.restype = c_void_p
    base.ggml_backend_buft_is_host.restype = c_bool
    base.ggml_backend_buft_is_host.argtypes = [c_void_p]
    base.ggml_graph_n_nodes.argtypes = [c_void_p]
    base.ggml_graph_node.restype = c_void_p
    base.ggml_graph_node.argtypes = [c_void_p, c_int]
    base.ggml_backend_graph_compute.argtypes = [c_void_p, c_void_p]
    return registry, base


def _cpu_library() -> ctypes.CDLL:
    """Return the library of ggml's CPU backend."""
    return ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-cpu.so.0"))


def is_known() -> bool:
    """Tell whether the structures in this module are those of the installed llama.cpp."""
    try:
        _, base = _libraries()
    except OSError:  # On this system, the libraries have other names.
        return False
    return bool(base.ggml_version() == GGML_VERSION.encode())


def has_blas() -> bool:
    """Tell whether the installed llama.cpp was built with BLAS; False if is_known() is False."""
    if not is_known():
        return False
    registry, _ = _libraries()
    return registry.ggml_backend_dev_by_name(b"BLAS") is not None


class PlainMemoryDevice:
    """Implement the device; it must live as long as the process."""

    name = b"PLAIN"
    kind = _ACCELERATOR
    memory = 0
    """The bytes of memory that the device reports, all of them free."""

    def __init__(self) -> None:
        """Register the device; contexts that are made from now on give it products."""
        self.products = 0
        """How many products the device has computed."""
        self.refused: list[str] = []
        """The names of operations that the device got but does not support."""
        self._registry, self._base = _libraries()
        self._name = ctypes.create_string_buffer(self.name)
        self._cpu = self._registry.ggml_backend_init_by_type(_CPU, None)
        _cpu_library().ggml_backend_cpu_set_n_threads(c_void_p(self._cpu), 1)
        self._device, self._backend, self._entry = _Device(), _Backend(), _Registry()
        self._guid = ctypes.create_string_buffer(b"plain memory....", 16)
        self._fill_entry()
        self._fill_backend()
        self._fill_device()
        self._registry.ggml_backend_device_register(ctypes.addressof(self._device))

    def _fill_entry(self) -> None:
        entry = self._entry
        entry.api_version = 2
        entry.get_name = _OF_NAME(lambda _: ctypes.addressof(self._name))
        entry.get_device_count = type(entry.get_device_count)(lambda _: 1)
        entry.get_device = type(entry.get_device)(lambda *_: ctypes.addressof(self._device))

    def _fill_backend(self) -> None:
        backend = self._backend
        backend.guid = ctypes.addressof(self._guid)
        backend.get_name = _OF_NAME(lambda _: ctypes.addressof(self._name))
        backend.free = type(backend.free)(lambda _: None)
        backend.graph_compute = _OF_COMPUTING(self._compute)
        backend.device = ctypes.addressof(self._device)

    def _fill_device(self) -> None:
        device = self._device
        memory = self._buffer_type()
        device.get_name = _OF_NAME(lambda _: ctypes.addressof(self._name))
        device.get_description = _OF_NAME(lambda _: ctypes.addressof(self._name))
        device.get_memory = type(device.get_memory)(self._tell_memory)
        device.get_type = _OF_TYPE(lambda _: self.kind)
        device.get_props = _OF_PROPERTIES(self._tell_properties)
        device.init_backend = _OF_BACKEND(lambda *_: ctypes.addressof(self._backend))
        device.get_buffer_type = _OF_BUFFER_TYPE(lambda _: memory)
        device.supports_op = _OF_SUPPORT(lambda _, node: self._computes(Tensor.from_address(node)))
        device.supports_buft = _OF_SUPPORT(lambda _, memory: self._can_use(memory))
        device.reg = ctypes.addressof(self._entry)

    def _buffer_type(self) -> int:
        """Return the address of the buffer type in which the device keeps tensors."""
        return int(self._base.ggml_backend_cpu_buffer_type())

    def _can_use(self, memory: int) -> bool:
        """Tell whether the device can compute with tensors in a buffer type."""
        return bool(self._base.ggml_backend_buft_is_host(memory))

    def _tell_memory(self, _: int, free: Any, total: Any) -> None:
        free[0] = total[0] = self.memory

    def _tell_properties(self, _: int, address: int) -> None:
        properties = _Properties.from_address(address)
        properties.name = properties.description = self.name
        properties.memory_free = properties.memory_total = self.memory
        properties.type = self.kind

    def _operation(self, node: Tensor) -> bytes:
        return bytes(self._base.ggml_op_name(node.op))

    def _computes(self, node: Tensor) -> bool:
        if self._operation(node) != b"MUL_MAT":
            return self._operation(node) in _VIEWS
        return node.ne[0] >= LEAST_VALUES and node.ne[1] >= LEAST_TOKENS

    def _compute(self, _: int, graph: int) -> int:
        for i in range(self._base.ggml_graph_n_nodes(graph)):
            node = Tensor.from_address(self._base.ggml_graph_node(graph, i))
            if not self._computes(node):
                self.refused.append(self._operation(node).decode())
                return _FAILED
            self.products += self._operation(node) == b"MUL_MAT"
        return int(self._base.ggml_backend_graph_compute(self._cpu, graph))
