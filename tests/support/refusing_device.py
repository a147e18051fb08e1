"""Define a ggml device with memory of its own that refuses some operations.

llama.cpp treats it as a GPU: it gives layers to it, and copies between its memory and that of the
CPU, since neither reads the other's. It computes everything but the operations that it refuses, as
CUDA refuses flash attention for heads of some sizes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection
from ctypes import CFUNCTYPE, c_bool, c_size_t, c_void_p

from tests.support.plain_memory_device import PlainMemoryDevice, Tensor

_GPU = 1

_OF_ALLOCATING = CFUNCTYPE(c_void_p, c_void_p, c_size_t)
_OF_ALIGNMENT = CFUNCTYPE(c_size_t, c_void_p)
_OF_HOST = CFUNCTYPE(c_bool, c_void_p)
_OF_BUFFER_NAME = CFUNCTYPE(c_void_p, c_void_p)
_OF_SIZE = CFUNCTYPE(c_size_t, c_void_p, c_void_p)

_Q8_0 = 8
"""The number of q8_0 among ggml's types."""


class _BufferType(ctypes.Structure):
    _fields_ = (
        ("get_name", _OF_BUFFER_NAME),
        ("alloc_buffer", _OF_ALLOCATING),
        ("get_alignment", _OF_ALIGNMENT),
        ("get_max_size", c_void_p),
        ("get_alloc_size", _OF_SIZE),
        ("is_host", _OF_HOST),
        ("device", c_void_p),
        ("context", c_void_p),
    )


class _Buffer(ctypes.Structure):
    """Define the first fields of a ggml_backend_buffer."""

    _fields_ = (("functions", c_void_p * 11), ("buffer_type", c_void_p))


class RefusingDevice(PlainMemoryDevice):
    """Define a GPU that refuses some operations; it must live as long as the process."""

    name = b"REFUSING"
    kind = _GPU
    memory = 1 << 30

    def __init__(
        self,
        head_dims: Collection[int] = (),
        operations: Collection[str] = (),
        of_views: Collection[str] = (),
        copies_rows: bool = False,
    ) -> None:
        """Register the device, which models that are loaded afterwards use.

        It refuses flash attention with keys of `head_dims` values, and all `operations`, by their
        names in ggml. Operations `of_views` are refused only if the values of their first source
        are not contiguous. If it `copies_rows`, attention over rows in q8_0 writes copies of them
        in f16 behind its results, as CUDA does for heads of some sizes.
        """
        self.overflows: list[str] = []
        """The names of operations that needed more room than their nodes were given."""
        self._copies_rows = copies_rows
        self._room: dict[int, int] = {}
        """How many bytes the device asked for at last, by the address of the node."""
        self._of_views = frozenset(operation.encode() for operation in of_views)
        self._head_dims = frozenset(head_dims)
        self._refuses = frozenset(operation.encode() for operation in operations)
        self._memory = _BufferType()
        super().__init__()

    def _buffer_type(self) -> int:
        cpu, base = super()._buffer_type(), self._base
        base.ggml_backend_buft_alloc_buffer.restype = c_void_p
        base.ggml_backend_buft_alloc_buffer.argtypes = [c_void_p, c_size_t]
        base.ggml_backend_buft_get_alignment.restype = c_size_t
        base.ggml_backend_buft_get_alignment.argtypes = [c_void_p]
        memory, address = self._memory, ctypes.addressof(self._memory)

        def allocate(_: int, size: int) -> int | None:
            buffer = base.ggml_backend_buft_alloc_buffer(cpu, size)
            if buffer:
                _Buffer.from_address(buffer).buffer_type = address
            return buffer

        memory.get_name = _OF_BUFFER_NAME(lambda _: ctypes.addressof(self._name))
        memory.alloc_buffer = _OF_ALLOCATING(allocate)
        memory.get_alignment = _OF_ALIGNMENT(lambda _: base.ggml_backend_buft_get_alignment(cpu))
        memory.is_host = _OF_HOST(lambda _: False)
        base.ggml_nbytes.restype = c_size_t
        base.ggml_nbytes.argtypes = [c_void_p]
        if self._copies_rows:
            memory.get_alloc_size = _OF_SIZE(lambda _, node: self._ask_for(node))
        memory.device = ctypes.addressof(self._device)
        return address

    def _needed(self, node: int) -> int:
        """Return how many bytes a node writes, from the address of its data on."""
        tensor = Tensor.from_address(node)
        needed = int(self._base.ggml_nbytes(node))
        if self._operation(tensor) != b"FLASH_ATTN_EXT":
            return needed
        rows = [Tensor.from_address(source) for source in tensor.src[1:3]]
        return needed + sum(2 * math.prod(r.ne) for r in rows if r.type == _Q8_0)

    def _ask_for(self, node: int) -> int:
        self._room[node] = self._needed(node)
        return self._room[node]

    def _compute(self, _: int, graph: int) -> int:
        for i in range(self._base.ggml_graph_n_nodes(graph)):
            node = self._base.ggml_graph_node(graph, i)
            given = self._room.get(node, 0)
            if self._copies_rows and self._needed(node) > max(given, self._base.ggml_nbytes(node)):
                self.overflows.append(self._operation(Tensor.from_address(node)).decode())
        return super()._compute(_, graph)

    def _can_use(self, memory: int) -> bool:
        return memory == ctypes.addressof(self._memory)

    def _computes(self, node: Tensor) -> bool:
        operation = self._operation(node)
        if operation == b"FLASH_ATTN_EXT":
            keys = Tensor.from_address(node.src[1])
            if keys.ne[0] in self._head_dims:
                return False
        if operation in self._of_views:
            source = Tensor.from_address(node.src[0])
            if any(source.nb[i + 1] != source.nb[i] * source.ne[i] for i in range(3)):
                return False
        return operation not in self._refuses
