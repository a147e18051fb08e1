"""Read a GGUF file of a 1.58-bit model: either I2_S of Microsoft's fork, or BitNet for stock
llama.cpp.

The I2_S type (number 36) was removed from ggml; the file format around it is plain GGUF.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType, GGUFWriter, ReaderField

from entropykv.convert.decoder import DecoderShape, check_tensors, drop_tied_head
from entropykv.convert.permuted import permuted
from entropykv.convert.source import (
    FileTensor,
    Source,
    Tensor,
    TernaryTensor,
    checked_scale,
    read_bytes,
)
from entropykv.convert.ternary import (
    I2S_TAIL_BYTES,
    Ternary,
    i2s_multiple,
    i2s_row_step,
    unpack_i2s,
)
from entropykv.errors import ModelFileError, UnsupportedModelError
from entropykv.model.geometry import ACTIVATION_KEY, check_loadable, geometry_of
from entropykv.model.header import (
    AGAIN,
    I2_S_TYPE,
    HeaderReader,
    check_prefix,
    damage_named,
    required,
    text_value,
)

# Microsoft's fork computes SiLU for the architecture `bitnet`. The names bitnet-b1.58 and bitnet-25
# belong to Microsoft's 2B-4T model, which uses squared ReLU.
_ACTIVATION_OF = {
    "bitnet": "silu",
    "bitnet-b1.58": "relu2",
    "bitnet-25": "relu2",
    "llama": "silu",
    "qwen2": "silu",
    "qwen3": "silu",
}
_TARGET_OF = {"bitnet-b1.58": "bitnet", "bitnet-25": "bitnet", "qwen2": "llama"}
# Microsoft's converter writes falcon_e, or no name, for the pre-tokenizer of Llama 3, which
# llama.cpp knows as llama-bpe only.
_UNKNOWN_SPLITS = {None, "falcon_e"}
_NOT_COPIED = {
    "general.architecture",
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
    ACTIVATION_KEY,
}


class RawValue(NamedTuple):
    """Hold the bytes of a metadata value as they stand in the file, to copy it unchanged."""

    data: bytes


@dataclass(frozen=True)
class I2sTensor(TernaryTensor):
    """Read a ternary tensor of type I2_S (number 36)."""

    path: Path
    name: str
    offset: int
    shape: tuple[int, int]
    layout: str

    @property
    def row_step(self) -> int:
        """Return how many rows fill whole blocks, because a block may contain parts of several
        rows.
        """
        return i2s_row_step(self.shape[1], self.layout)

    def rows(self, first: int, count: int) -> Ternary:
        """Unpack the codes of `count` rows from row `first` on; returns (count, columns)."""
        columns = self.shape[1]
        codes = read_bytes(self.path, self.offset + first * columns // 4, count * columns // 4)
        return unpack_i2s(codes, (count, columns), self.layout)

    def scale(self) -> np.float32:
        """Return the scale after the codes; raises ModelFileError unless finite and above 0."""
        tail = read_bytes(self.path, self.offset + math.prod(self.shape) // 4, 4)
        return checked_scale(self.path, self.name, struct.unpack("<f", tail.tobytes())[0])


class _I2sReader(HeaderReader):
    """Read a header as HeaderReader does, accept I2_S tensors, and record where tensors and values
    are.
    """

    def __init__(self, path: Path, layout: str) -> None:
        self.layout = layout
        # Offset and size in bytes of each value, in the order of the keys.
        self.values: list[tuple[int, int]] = []
        self.weights: dict[str, Tensor] = {}
        super().__init__(path)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        parts = super()._get_field_parts(orig_offs, raw_type)
        self.values.append((orig_offs, parts[0]))
        return parts

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self._refuse_tables(fields)
        for field in fields:
            if field.name in self.weights:
                raise ValueError(f"two tensors are named {field.name}")
            _, _, _, dims, raw_type, offset = field.parts
            shape = tuple(reversed(dims.tolist()))
            self.weights[field.name] = self._weight(
                field.name, int(raw_type[0]), shape, int(start_offs) + int(offset[0])
            )

    def _weight(self, name: str, raw_type: int, shape: tuple[int, ...], offset: int) -> Tensor:
        tensor: Tensor
        if raw_type == I2_S_TYPE:
            if not _fits_i2s(shape, self.layout):
                raise ValueError(f"tensor {name} of type I2_S has shape {list(shape)}")
            kind, n_bytes = "I2_S", math.prod(shape) // 4 + I2S_TAIL_BYTES
            tensor = I2sTensor(self.path, name, offset, (shape[0], shape[1]), self.layout)
        else:
            of, n_bytes = self._tensor_bytes(name, raw_type, list(reversed(shape)))
            kind, tensor = of.name, FileTensor(self.path, offset, of, shape)
        self.type_bytes[kind] += n_bytes
        if offset + n_bytes > len(self.data):
            raise ModelFileError(
                f"{self.path}: is truncated, {offset + n_bytes - len(self.data)} bytes of tensor "
                f"{name} are missing; {AGAIN}"
            )
        return tensor

    def copied(
        self, architecture: str, target: str, *, without: set[str]
    ) -> list[tuple[str, GGUFValueType, RawValue]]:
        """Return the metadata for the converted file, with the keys of the target architecture, and
        none of the keys `without`.
        """
        fields = [field for field in self.fields.values() if not field.name.startswith("GGUF.")]
        prefix = f"{architecture}."
        kept = []
        for field, (offset, size) in zip(fields, self.values, strict=True):
            name = field.name
            if name.startswith(prefix):
                name = f"{target}.{name[len(prefix) :]}"
            if name not in without:
                data = self.data[offset : offset + size].tobytes()
                kept.append((name, field.types[0], RawValue(data)))
        return kept


def _fits_i2s(shape: tuple[int, ...], layout: str) -> bool:
    """Tell whether a tensor of this shape fills whole bytes and blocks of the layout."""
    if len(shape) != 2 or min(shape) < 1 or math.prod(shape) % i2s_multiple(layout) != 0:
        return False
    return layout != "rows4" or shape[0] % 4 == 0


def read_gguf(path: Path, *, i2s_layout: str = "x86") -> Source:
    """Read the header of a 1.58-bit GGUF and check every tensor; weights are read later, row by
    row.

    Raises ModelFileError for a damaged file, and UnsupportedModelError for another kind of model.
    """
    file_bytes = check_prefix(path)
    with damage_named(path):
        return _source(_I2sReader(path, i2s_layout), path, file_bytes)


def _source(reader: _I2sReader, path: Path, file_bytes: int) -> Source:
    architecture = _architecture(reader, path)
    check_loadable(reader, architecture)
    shape = _shape(reader, path, file_bytes, architecture)
    tensors = dict(reader.weights)
    drop_tied_head(path, shape, tensors)
    check_tensors(path, shape, tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, I2sTensor) and f"{name.removesuffix('.weight')}.scale" in tensors:
            raise ModelFileError(f"{path}: has two scales for {name}; {AGAIN}")
    if architecture == "qwen2":
        tensors = {n: permuted(n, tensor, shape.head_dim) for n, tensor in tensors.items()}
    split = text_value(reader, "tokenizer.ggml.pre")
    is_bpe = text_value(reader, "tokenizer.ggml.model") == "gpt2"
    replaces_split = is_bpe and split in _UNKNOWN_SPLITS
    without = _NOT_COPIED | ({"tokenizer.ggml.pre"} if replaces_split else set())
    values = reader.copied(architecture, shape.architecture, without=without)

    def add_metadata(writer: GGUFWriter) -> None:
        for key, kind, value in values:
            writer.add_key_value(key, value, kind)
        if replaces_split:
            writer.add_tokenizer_pre("llama-bpe")

    return Source(
        path=path,
        architecture=architecture,
        target_architecture=shape.architecture,
        activation=text_value(reader, ACTIVATION_KEY) or _ACTIVATION_OF[architecture],
        tensors=tensors,
        n_bytes=file_bytes,
        keeps_types=True,
        add_metadata=add_metadata,
    )


def _architecture(reader: _I2sReader, path: Path) -> str:
    architecture = text_value(reader, "general.architecture")
    if architecture is None:
        raise ModelFileError(f"{path}: lacks general.architecture; {AGAIN}")
    if architecture not in _ACTIVATION_OF:
        raise UnsupportedModelError(
            f"{path}: has architecture {architecture!r}, but only 1.58-bit models of these are "
            f"converted: {', '.join(_ACTIVATION_OF)}; stock llama.cpp needs no conversion of others"
        )
    target = _TARGET_OF.get(architecture, architecture)
    if target != "bitnet" and not reader.type_bytes["I2_S"]:
        raise UnsupportedModelError(
            f"{path}: has architecture {architecture!r} and no I2_S weights, so that stock "
            "llama.cpp needs no conversion; run it as it is"
        )
    if "split.count" in reader.fields and required(reader, "split.count") > 1:
        raise UnsupportedModelError(
            f"{path}: is one part of a split model; merge it first with llama-gguf-split --merge"
        )
    return architecture


def _shape(reader: _I2sReader, path: Path, file_bytes: int, architecture: str) -> DecoderShape:
    geometry = geometry_of(reader, path, file_bytes)
    n_kv_heads = set(geometry.kv_heads_per_layer)
    if (
        len(n_kv_heads) != 1
        or min(n_kv_heads) < 1
        or geometry.n_head < 1
        or geometry.head_dim_k != geometry.head_dim_v
        or geometry.head_dim_k % 2 != 0
    ):
        raise UnsupportedModelError(
            f"{path}: its layers have different KV heads, or K and V of different or odd sizes, "
            "which no 1.58-bit model of the architectures that are converted has"
        )
    return DecoderShape(
        architecture=_TARGET_OF.get(architecture, architecture),
        n_layer=geometry.n_layer,
        n_embd=required(reader, f"{architecture}.embedding_length"),
        n_head=geometry.n_head,
        n_head_kv=geometry.kv_heads_per_layer[0],
        head_dim=geometry.head_dim_k,
        n_ff=required(reader, f"{architecture}.feed_forward_length"),
        n_vocab=geometry.n_vocab,
    )
