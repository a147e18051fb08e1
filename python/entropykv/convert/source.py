"""Define what all readers of `convert` return: a model as tensors that are read some rows at a
time.

Tensors have the names of llama.cpp's graphs; shapes are (rows, columns) or (columns,).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from entropykv.convert.ternary import Bytes, Floats, Ternary
from entropykv.errors import ModelFileError, UnsupportedModelError

EMBEDDING = "token_embd.weight"
CHUNK_ELEMENTS = 1 << 20
"""The most elements that are read at once. Exceptions are read whole: a single longer row, and
query and key projections whose rows are reordered.
"""

FLOAT_TYPES = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
)


class Tensor(ABC):
    """Read a tensor; methods raise ModelFileError if its file cannot be read."""

    shape: tuple[int, ...]

    @abstractmethod
    def floats(self) -> Floats:
        """Return the whole tensor, dequantised to float32, in its shape."""

    def float_chunks(self) -> Iterator[Floats]:
        """Yield all values of the tensor in order, as one array or as arrays of some rows."""
        yield self.floats()


@dataclass(frozen=True)
class FileTensor(Tensor):
    """Read a tensor stored in a type that llama.cpp knows, at `offset` of `path`."""

    path: Path
    offset: int
    kind: GGMLQuantizationType
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Return the size in the file, in bytes."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes

    def raw(self) -> Bytes:
        """Read all bytes, as they are stored; returns (n_bytes,)."""
        return read_bytes(self.path, self.offset, self.n_bytes)

    def raw_chunks(self) -> Iterator[Bytes]:
        """Yield all bytes as they are stored, some rows at a time, each time (rows, bytes of a
        row).
        """
        columns = self.shape[-1]
        rows = math.prod(self.shape[:-1])
        step = max(1, CHUNK_ELEMENTS // columns)
        for first in range(0, rows, step):
            yield self.raw_rows(first, min(step, rows - first))

    def raw_rows(self, first: int, count: int) -> Bytes:
        """Read the bytes of `count` rows from `first` on; returns (count, bytes of a row)."""
        row_bytes = self.n_bytes // math.prod(self.shape[:-1])
        data = read_bytes(self.path, self.offset + first * row_bytes, count * row_bytes)
        return data.reshape(count, row_bytes)

    def float_rows(self, first: int, count: int) -> Floats:
        """Return `count` rows from row `first` on in float32, (count, values of a row).

        Raises UnsupportedModelError for a type that gguf cannot read.
        """
        return self._as_floats(self.raw_rows(first, count))

    def float_chunks(self) -> Iterator[Floats]:
        """Yield all values of the tensor, some rows at a time, each time (rows, columns)."""
        for data in self.raw_chunks():
            yield self._as_floats(data)

    def floats(self) -> Floats:
        """Return the whole tensor, dequantised to float32."""
        return self._as_floats(self.raw().reshape(1, -1)).reshape(self.shape)

    def _as_floats(self, data: Bytes) -> Floats:
        try:
            return as_floats(data, self.kind)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self.path}: has tensors of type {self.kind.name}, which cannot be converted; "
                "use a file with other types"
            ) from None


@dataclass(frozen=True)
class ArrayTensor(Tensor):
    """Hold a small tensor that was computed rather than read from a file."""

    shape: tuple[int, ...]
    values: Floats

    def floats(self) -> Floats:
        """Return the computed values."""
        return self.values


class TernaryTensor(Tensor):
    """Read a tensor of values -1, 0 and 1 with one common scale."""

    shape: tuple[int, int]

    @property
    def row_step(self) -> int:
        """Return the granularity of reads: `first` and `count` of rows() are multiples of it,
        except at the end.
        """
        return 1

    @abstractmethod
    def rows(self, first: int, count: int) -> Ternary:
        """Return `count` rows without their scale, (count, columns), from row `first` on, which is
        a multiple of row_step.
        """

    @abstractmethod
    def scale(self) -> np.float32:
        """Return the factor of the ternary values; raises ModelFileError unless it is finite and
        above 0.
        """

    def ternary_chunks(self) -> Iterator[Ternary]:
        """Yield all rows without their scale, in order, as arrays of some rows, so that a large
        tensor is never whole in memory.
        """
        rows, columns = self.shape
        step = max(1, CHUNK_ELEMENTS // (columns * self.row_step)) * self.row_step
        for first in range(0, rows, step):
            yield self.rows(first, min(step, rows - first))

    def floats(self) -> Floats:
        """Return the ternary values times the scale, (rows, columns)."""
        return np.concatenate(list(self.float_chunks()))

    def float_chunks(self) -> Iterator[Floats]:
        """Yield ternary values times scale, some rows at a time, each time (rows, columns)."""
        for ternary in self.ternary_chunks():
            yield ternary.astype(np.float32) * self.scale()


@dataclass(frozen=True)
class Source:
    """Describe a model that can be converted; `add_metadata` writes its metadata and tokenizer.

    `n_bytes` is the size of its files. `architecture` is the one that the source declares,
    `target_architecture` the one that is written. If `keeps_types` is true, projections that are
    not ternary are copied without quantising them.
    """

    path: Path
    architecture: str
    target_architecture: str
    activation: str
    tensors: dict[str, Tensor]
    n_bytes: int
    keeps_types: bool
    add_metadata: Callable[[GGUFWriter], None]


def read_bytes(path: Path, offset: int, count: int) -> Bytes:
    """Read `count` bytes at `offset`; raises ModelFileError if they cannot be read.

    The file is not mapped, because mapped pages would count as memory of the process.
    """
    try:
        data = np.fromfile(path, dtype=np.uint8, count=count, offset=offset)
    except OSError as error:
        raise ModelFileError(
            f"{path}: cannot be read ({error.strerror or error}); check the disk it is on"
        ) from error
    if data.size != count:
        raise ModelFileError(
            f"{path}: ends {count - data.size} bytes early; download or convert it again"
        )
    return data


def as_floats(data: Bytes, kind: GGMLQuantizationType) -> Floats:
    """Dequantise rows of bytes, (rows, bytes of a row), to float32, (rows, columns); raises
    NotImplementedError for a type that gguf cannot read.
    """
    if kind == GGMLQuantizationType.BF16:
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    values: Floats = dequantize(data, kind)
    return values


def checked_scale(path: Path, name: str, scale: float | np.float32) -> np.float32:
    """Return the scale of a tensor; raises ModelFileError unless it is finite and above 0."""
    if not np.isfinite(scale) or scale <= 0:
        raise ModelFileError(
            f"{path}: is damaged (the scale of {name} is {scale}); download or convert it again"
        )
    return np.float32(scale)
