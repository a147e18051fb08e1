"""Read a GGUF file of a BitNet model: I2_S of Microsoft's fork, or one that stock llama.cpp loads.

The I2_S type (36) was removed from ggml; the file format around it is plain GGUF.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, ReaderField

from entropykv.convert.source import (
    ARCHITECTURE,
    BitNetShape,
    FileTensor,
    Source,
    Tensor,
    TernaryTensor,
    check_tensors,
    checked_scale,
    drop_tied_head,
    read_bytes,
)
from entropykv.convert.ternary import I2S_TAIL_BYTES, Ternary, i2s_multiple, unpack_i2s
from entropykv.errors import ModelFileError, UnsupportedModelError
from entropykv.model.geometry import ACTIVATION_KEY, geometry_of
from entropykv.model.header import (
    AGAIN,
    I2_S_TYPE,
    HeaderReader,
    check_prefix,
    damage_named,
    required,
    text_value,
)

# The fork's own graph of `bitnet` uses SiLU; its other two are the 2B-4T's.
_ACTIVATION_OF = {"bitnet": "silu", "bitnet-b1.58": "relu2", "bitnet-25": "relu2"}
_NOT_COPIED = {
    "general.architecture",
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
    ACTIVATION_KEY,
}


class RawValue(NamedTuple):
    """A value of the metadata as the bytes that stand in the file."""

    data: bytes


@dataclass(frozen=True)
class I2sTensor(TernaryTensor):
    """A ternary tensor of type 36."""

    path: Path
    name: str
    offset: int
    shape: tuple[int, int]
    layout: str

    def ternary(self) -> Ternary:
        """Unpack the codes."""
        codes = read_bytes(self.path, self.offset, math.prod(self.shape) // 4)
        return unpack_i2s(codes, self.shape, self.layout)

    def scale(self) -> np.float32:
        """The F32 behind the codes."""
        tail = read_bytes(self.path, self.offset + math.prod(self.shape) // 4, 4)
        return checked_scale(self.path, self.name, struct.unpack("<f", tail.tobytes())[0])


class _BitNetReader(HeaderReader):
    """The guarded header reader; knows I2_S, and keeps where tensors and values are."""

    def __init__(self, path: Path, layout: str) -> None:
        self.layout = layout
        self.values: list[tuple[int, int]] = []  # (offset, size), in the order of the keys
        self.weights: dict[str, Tensor] = {}
        super().__init__(path)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        parts = super()._get_field_parts(orig_offs, raw_type)
        self.values.append((orig_offs, parts[0]))
        return parts

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
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
            if len(shape) != 2 or min(shape) < 1 or math.prod(shape) % i2s_multiple(self.layout):
                raise ValueError(f"tensor {name} of type I2_S has shape {list(shape)}")
            kind, n_bytes = "I2_S", math.prod(shape) // 4 + I2S_TAIL_BYTES
            tensor = I2sTensor(self.path, name, offset, (shape[0], shape[1]), self.layout)
        else:
            kind, n_bytes = self._tensor_bytes(name, raw_type, list(reversed(shape)))
            tensor = FileTensor(self.path, offset, GGMLQuantizationType(raw_type), shape)
        self.type_bytes[kind] += n_bytes
        if offset + n_bytes > len(self.data):
            raise ModelFileError(
                f"{self.path}: is truncated, {offset + n_bytes - len(self.data)} bytes of tensor "
                f"{name} are missing; {AGAIN}"
            )
        return tensor

    def copied(self, architecture: str) -> list[tuple[str, GGUFValueType, RawValue]]:
        """The metadata that a converted file keeps, with the keys of the stock architecture."""
        fields = [field for field in self.fields.values() if not field.name.startswith("GGUF.")]
        prefix = f"{architecture}."
        kept = []
        for field, (offset, size) in zip(fields, self.values, strict=True):
            name = field.name
            if name.startswith(prefix):
                name = f"{ARCHITECTURE}.{name[len(prefix) :]}"
            if name not in _NOT_COPIED:
                data = self.data[offset : offset + size].tobytes()
                kept.append((name, field.types[0], RawValue(data)))
        return kept


def read_gguf(path: Path, *, i2s_layout: str = "x86") -> Source:
    """Read the header of a BitNet GGUF and check every tensor; weights are read later.

    Raises ModelFileError and UnsupportedModelError.
    """
    file_bytes = check_prefix(path)
    with damage_named(path):
        return _source(_BitNetReader(path, i2s_layout), path, file_bytes)


def _source(reader: _BitNetReader, path: Path, file_bytes: int) -> Source:
    architecture = _architecture(reader, path)
    shape = _shape(reader, path, file_bytes, architecture)
    tensors = dict(reader.weights)
    drop_tied_head(path, tensors)
    check_tensors(path, shape, tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, I2sTensor) and f"{name.removesuffix('.weight')}.scale" in tensors:
            raise ModelFileError(f"{path}: has two scales for {name}; {AGAIN}")
    activation = text_value(reader, ACTIVATION_KEY) or _ACTIVATION_OF[architecture]
    values = reader.copied(architecture)
    is_bpe = text_value(reader, "tokenizer.ggml.model") == "gpt2"
    lacks_pre = is_bpe and reader.get_field("tokenizer.ggml.pre") is None

    def add_metadata(writer: GGUFWriter) -> None:
        for key, kind, value in values:
            writer.add_key_value(key, value, kind)
        if lacks_pre:  # as Microsoft's converter leaves it
            writer.add_tokenizer_pre("llama-bpe")

    return Source(
        path=path,
        architecture=architecture,
        activation=activation,
        shape=shape,
        tensors=tensors,
        n_bytes=file_bytes,
        keeps_types=True,
        add_metadata=add_metadata,
    )


def _architecture(reader: _BitNetReader, path: Path) -> str:
    architecture = text_value(reader, "general.architecture")
    if architecture is None:
        raise ModelFileError(f"{path}: lacks general.architecture; {AGAIN}")
    if architecture not in _ACTIVATION_OF:
        raise UnsupportedModelError(
            f"{path}: has architecture {architecture!r}, but only BitNet models are converted "
            f"({', '.join(_ACTIVATION_OF)}); stock llama.cpp needs no conversion of other models"
        )
    if "split.count" in reader.fields and required(reader, "split.count") > 1:
        raise UnsupportedModelError(
            f"{path}: is one part of a split model; merge it first with llama-gguf-split --merge"
        )
    return architecture


def _shape(reader: _BitNetReader, path: Path, file_bytes: int, architecture: str) -> BitNetShape:
    geometry = geometry_of(reader, path, file_bytes)
    if len(set(geometry.kv_heads_per_layer)) != 1 or geometry.n_head < 1:
        raise UnsupportedModelError(
            f"{path}: its layers have different KV heads, which is no BitNet b1.58 model"
        )
    return BitNetShape(
        n_layer=geometry.n_layer,
        n_embd=required(reader, f"{architecture}.embedding_length"),
        n_embd_kv=geometry.kv_heads_per_layer[0] * geometry.head_dim_k,
        n_ff=required(reader, f"{architecture}.feed_forward_length"),
        n_vocab=geometry.n_vocab,
    )
