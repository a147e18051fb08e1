"""What the readers of convert have in common: a BitNet model as tensors that are read one by one.

Tensors have the names of llama.cpp's bitnet graph; shapes are (rows, columns) or (columns,).
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

ARCHITECTURE = "bitnet"
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
_CHUNK_ELEMENTS = 1 << 20

FLOAT_TYPES = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
)


@dataclass(frozen=True)
class BitNetShape:
    """Sizes of a model, in elements; `n_embd_kv` is KV heads times head size."""

    n_layer: int
    n_embd: int
    n_embd_kv: int
    n_ff: int
    n_vocab: int

    def projections(self) -> dict[str, tuple[int, int]]:
        """Names (without `.weight`) and shapes of the ternary tensors."""
        n_embd, n_ff = self.n_embd, self.n_ff
        block = {
            "attn_q": (n_embd, n_embd),
            "attn_k": (self.n_embd_kv, n_embd),
            "attn_v": (self.n_embd_kv, n_embd),
            "attn_output": (n_embd, n_embd),
            "ffn_gate": (n_ff, n_embd),
            "ffn_up": (n_ff, n_embd),
            "ffn_down": (n_embd, n_ff),
        }
        return {
            f"blk.{layer}.{name}": shape
            for layer in range(self.n_layer)
            for name, shape in block.items()
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the bitnet graph needs, with its shape."""
        block = {
            "attn_norm": self.n_embd,
            "attn_sub_norm": self.n_embd,
            "ffn_norm": self.n_embd,
            "ffn_sub_norm": self.n_ff,
        }
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.n_vocab, self.n_embd)}
        shapes["output_norm.weight"] = (self.n_embd,)
        for layer in range(self.n_layer):
            for name, size in block.items():
                shapes[f"blk.{layer}.{name}.weight"] = (size,)
        return shapes | {f"{name}.weight": shape for name, shape in self.projections().items()}


class Tensor(ABC):
    """A tensor somewhere in a file."""

    shape: tuple[int, ...]

    @abstractmethod
    def floats(self) -> Floats:
        """The whole tensor, dequantised, in its shape."""

    def float_chunks(self) -> Iterator[Floats]:
        """All values, some rows at a time."""
        yield self.floats()


@dataclass(frozen=True)
class FileTensor(Tensor):
    """A tensor stored in a type that llama.cpp knows, at `offset` of `path`."""

    path: Path
    offset: int
    kind: GGMLQuantizationType
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Size in the file."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes

    def raw(self) -> Bytes:
        """All bytes."""
        return read_bytes(self.path, self.offset, self.n_bytes)

    def raw_chunks(self) -> Iterator[Bytes]:
        """All bytes, some rows at a time."""
        columns = self.shape[-1]
        rows = math.prod(self.shape[:-1])
        row_bytes = self.n_bytes // rows
        step = max(1, _CHUNK_ELEMENTS // columns)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            data = read_bytes(self.path, self.offset + first * row_bytes, count * row_bytes)
            yield data.reshape(count, row_bytes)

    def float_chunks(self) -> Iterator[Floats]:
        """All values, some rows at a time."""
        for data in self.raw_chunks():
            yield self._as_floats(data)

    def floats(self) -> Floats:
        """The whole tensor."""
        return self._as_floats(self.raw().reshape(1, -1)).reshape(self.shape)

    def _as_floats(self, data: Bytes) -> Floats:
        try:
            return as_floats(data, self.kind)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self.path}: has tensors of type {self.kind.name}, which cannot be converted; "
                "use a file with other types"
            ) from None


class TernaryTensor(Tensor):
    """A tensor of -1, 0 and 1 with one scale."""

    @abstractmethod
    def ternary(self) -> Ternary:
        """The whole tensor without its scale; shape (rows, columns)."""

    @abstractmethod
    def scale(self) -> np.float32:
        """What the ternary values are multiplied with: finite and above 0."""

    def floats(self) -> Floats:
        """Ternary values times scale."""
        return self.ternary().astype(np.float32) * self.scale()


@dataclass(frozen=True)
class Source:
    """A model that can be converted; `add_metadata` writes its keys and tokenizer.

    `keeps_types`: projections that are not ternary tensors are copied.
    """

    path: Path
    architecture: str
    activation: str
    shape: BitNetShape
    tensors: dict[str, Tensor]
    n_bytes: int
    keeps_types: bool
    add_metadata: Callable[[GGUFWriter], None]


def read_bytes(path: Path, offset: int, count: int) -> Bytes:
    """Read a part of a file. Read, not mapped: mapped pages would count as our memory."""
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
    """Dequantise rows of bytes. NotImplementedError for types that gguf cannot dequantise."""
    if kind == GGMLQuantizationType.BF16:
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    values: Floats = dequantize(data, kind)
    return values


def checked_scale(path: Path, name: str, scale: float | np.float32) -> np.float32:
    """Check the scale of a tensor: ModelFileError unless it is finite and above 0."""
    if not np.isfinite(scale) or scale <= 0:
        raise ModelFileError(
            f"{path}: is damaged (the scale of {name} is {scale}); download or convert it again"
        )
    return np.float32(scale)


def drop_tied_head(path: Path, tensors: dict[str, Tensor]) -> None:
    """Remove a head that equals the embedding; UnsupportedModelError for one of its own."""
    head = tensors.pop(HEAD, None)
    if head is None:
        return
    embedding = tensors.get(EMBEDDING)
    if (
        not isinstance(head, FileTensor)
        or not isinstance(embedding, FileTensor)
        or not _equal(head, embedding)
    ):
        raise UnsupportedModelError(
            f"{path}: has an untied head (its output.weight is not its token_embd.weight), which "
            "llama.cpp's bitnet graph cannot run; use a checkpoint with tied embeddings"
        )


def _equal(one: FileTensor, other: FileTensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.kind == other.kind:
        pairs = zip(one.raw_chunks(), other.raw_chunks(), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)
    chunks = zip(one.float_chunks(), other.float_chunks(), strict=True)
    return all(np.array_equal(a, b) for a, b in chunks)


def check_tensors(path: Path, shape: BitNetShape, tensors: dict[str, Tensor]) -> None:
    """Refuse a tensor that is missing, too many, or of a size the bitnet graph cannot have."""
    expected = shape.tensors()
    optional = {f"{name}.scale": (1,) for name in shape.projections()}
    for name, tensor in tensors.items():
        wanted = expected.get(name, optional.get(name))
        if wanted is None:
            raise UnsupportedModelError(
                f"{path}: has a tensor {name}, for which llama.cpp's bitnet graph has no place; "
                "use a model of the BitNet b1.58 architecture"
            )
        if tensor.shape != wanted:
            raise ModelFileError(
                f"{path}: tensor {name} has shape {list(tensor.shape)} where its other sizes ask "
                f"for {list(wanted)}; download or convert it again"
            )
    for name in expected:
        if name not in tensors:
            raise ModelFileError(f"{path}: lacks tensor {name}; download or convert it again")
