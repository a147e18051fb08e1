"""ModelGeometry: what the header of a GGUF file says about a model, without loading it."""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

from entropykv.errors import EntropyKVError, ModelFileError, UnsupportedModelError

I2_S_TYPE = 36
"""Tensor type of Microsoft's BitNet fork; removed from, and unknown to, stock llama.cpp."""

ACTIVATION_KEY = "entropykv.activation"
"""Metadata of our own: what the feed-forward gates compute, where the architecture leaves it open.

BitNet files have both kinds: SiLU (1bitLLM) and squared ReLU (Microsoft's 2B-4T).
"""
ACTIVATIONS = ("silu", "relu2")

_SUPPORTED_VERSIONS = (2, 3)
_PREFIX = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of keys
_LENGTH = struct.Struct("<Q")
# Limits far above any real model: a damaged count must not cost seconds or gigabytes.
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS of llama.cpp
_MAX_ENTRIES = 1 << 16  # keys, tensors
_MAX_STRINGS = 1 << 22  # vocabulary, merges
_MAX_STRING_BYTES = 1 << 24
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_MAX_NUMBER = (1 << 31) - 1
_AGAIN = "download or convert it again"


@dataclass(frozen=True)
class ModelGeometry:
    """Shape and weights of a model, as its GGUF header declares them.

    `n_head` is the maximum of `heads_per_layer`; recurrent layers count 0 heads. Head sizes are
    elements of one head, `n_ctx_train` is tokens. `weights_bytes` is the sum of the tensors of
    this file (of a split model: of this part); `weight_types` is (type, bytes), largest first.
    `activation` is the file's `entropykv.activation`: "relu2" for squared ReLU, "silu" or None for
    what llama.cpp's graph of the architecture computes.
    """

    path: Path
    architecture: str
    name: str
    n_layer: int
    n_head: int
    heads_per_layer: tuple[int, ...]
    kv_heads_per_layer: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int
    n_ctx_train: int
    n_vocab: int
    weights_bytes: int
    file_bytes: int
    weight_types: tuple[tuple[str, int], ...]
    activation: str | None


def read_geometry(path: str | os.PathLike[str]) -> ModelGeometry:
    """Read the header of a GGUF file; tensor data is not read.

    Raises ModelFileError for a file that is missing, truncated, damaged or not GGUF, and
    UnsupportedModelError for an I2_S file of Microsoft's BitNet fork or an unknown activation.
    """
    path = Path(path)
    file_bytes = _check_prefix(path)
    try:
        return _geometry_of(_HeaderReader(path), path, file_bytes)
    except EntropyKVError:
        raise
    except Exception as error:  # gguf and numpy raise anything on a damaged header
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelFileError(f"{path}: is truncated or damaged ({reason}); {_AGAIN}") from error


def _check_prefix(path: Path) -> int:
    """Check magic, version and counts in the first 24 bytes; return the size of the file."""
    try:
        if path.is_dir():
            raise ModelFileError(f"{path}: is a directory; give the path of a GGUF file")
        if path.exists() and not path.is_file():
            raise ModelFileError(f"{path}: is not a regular file; give the path of a GGUF file")
        with open(path, "rb") as file:
            prefix = file.read(_PREFIX.size)
            file_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; give the path of a GGUF file") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path}: cannot be read ({error}); give the path of a GGUF file"
        ) from error
    if not prefix:
        raise ModelFileError(f"{path}: is empty; {_AGAIN}")
    if not prefix.startswith(b"GGUF"[: len(prefix)]):
        raise ModelFileError(f"{path}: is not a GGUF file; give a model converted to GGUF")
    if len(prefix) < _PREFIX.size:
        raise ModelFileError(f"{path}: is truncated after {len(prefix)} bytes; {_AGAIN}")
    _, version, n_tensors, n_keys = _PREFIX.unpack(prefix)
    if version not in _SUPPORTED_VERSIONS:
        raise ModelFileError(
            f"{path}: has GGUF version {version}, but only little-endian files of version 2 or 3 "
            "can be read; convert the model again"
        )
    if max(n_tensors, n_keys) > _MAX_ENTRIES:
        raise ModelFileError(
            f"{path}: is damaged (it declares {n_tensors} tensors and {n_keys} keys); {_AGAIN}"
        )
    return file_bytes


class _HeaderReader(GGUFReader):
    """GGUFReader that never reads past the file, skips over arrays, and leaves tensors alone.

    The base class makes numpy objects for every element of an array: seconds for a vocabulary.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.type_bytes: Counter[str] = Counter()
        super().__init__(path)

    def _check_end(self, end: int) -> None:
        if end > len(self.data):
            raise ValueError(f"its header asks for byte {end} of {len(self.data)}")

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None
    ) -> npt.NDArray[Any]:
        self._check_end(int(offset) + int(count) * np.dtype(dtype).itemsize)
        return super()._get(offset, dtype, count, override_order)

    def _get_str(self, offset: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        length = int(self._get(offset, np.uint64)[0])
        if length > _MAX_STRING_BYTES:
            raise ValueError(f"a text of {length} bytes in the header")
        return super()._get_str(offset)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw_item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, count, start = GGUFValueType(raw_item[0]), int(length[0]), orig_offs + 12
        types = [GGUFValueType.ARRAY, item]
        if item == GGUFValueType.STRING:
            return 12 + self._strings_bytes(start, count), [raw_item, length], [], types
        items = self._get(start, self.gguf_scalar_to_np[item], count)  # KeyError: nested array
        return 12 + items.nbytes, [raw_item, length, items], [2], types

    def _strings_bytes(self, start: int, count: int) -> int:
        """Size in bytes of `count` strings at offset `start`."""
        if count > _MAX_STRINGS:
            raise ValueError(f"an array of {count} texts in the header")
        offset = start
        with self.data.data as view:
            for _ in range(count):
                self._check_end(offset + _LENGTH.size)
                offset += _LENGTH.size + _LENGTH.unpack_from(view, offset)[0]
        self._check_end(offset)
        return offset - start

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        field = super()._get_tensor_info_field(orig_offs)
        n_dims = int(field.parts[2][0])
        if not 1 <= n_dims <= _MAX_DIMENSIONS or not field.name:  # stops early among zeros
            raise ValueError(f"tensor {field.name!r} has {n_dims} dimensions")
        return field

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Add up the bytes of every tensor type, and check that no tensor ends past the file."""
        end = 0
        for field in fields:
            _, _, _, dims, raw_type, offset = field.parts
            kind, n_bytes = self._tensor_bytes(field.name, int(raw_type[0]), dims.tolist())
            self.type_bytes[kind] += n_bytes
            end = max(end, int(start_offs) + int(offset[0]) + n_bytes)
        if end > len(self.data):
            raise ModelFileError(
                f"{self.path}: is truncated, {end - len(self.data)} of at least {end} bytes "
                f"are missing; {_AGAIN}"
            )

    def _tensor_bytes(self, name: str, raw_type: int, dims: list[int]) -> tuple[str, int]:
        """Type name and size in bytes of one tensor of `dims` elements."""
        if raw_type == I2_S_TYPE:
            raise UnsupportedModelError(
                f"{self.path}: is an I2_S file of Microsoft's BitNet fork, which stock llama.cpp "
                f"cannot load; make one that it can with `entropykv convert {self.path} OUT.gguf`"
            )
        try:
            kind = GGMLQuantizationType(raw_type)
        except ValueError:
            raise ValueError(f"tensor {name} has the unknown type {raw_type}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(dims) < 1 or dims[0] % block != 0:
            raise ValueError(f"tensor {name} of type {kind.name} has shape {dims}")
        return kind.name, math.prod(dims) // block * block_bytes


def _geometry_of(reader: _HeaderReader, path: Path, file_bytes: int) -> ModelGeometry:
    architecture = _text(reader, "general.architecture")
    if architecture is None:
        raise ModelFileError(f"{path}: lacks general.architecture; {_AGAIN}")
    layers = _required(reader, f"{architecture}.block_count")
    if layers > _MAX_LAYERS:
        raise ValueError(f"{architecture}.block_count is {layers}")
    heads = _per_layer(reader, f"{architecture}.attention.head_count", layers)
    if heads is None:
        raise ModelFileError(f"{path}: lacks {architecture}.attention.head_count; {_AGAIN}")
    kv_heads = _per_layer(reader, f"{architecture}.attention.head_count_kv", layers) or heads
    for n_head, n_head_kv in zip(heads, kv_heads, strict=True):
        if n_head_kv > 0 and n_head % n_head_kv != 0:
            raise ValueError(f"head_count {n_head} is no multiple of head_count_kv {n_head_kv}")
    n_embd = _required(reader, f"{architecture}.embedding_length")
    default_dim = n_embd // (heads[0] or max(heads)) if max(heads) > 0 else 0
    key_length = _number(reader, f"{architecture}.attention.key_length")
    value_length = _number(reader, f"{architecture}.attention.value_length")
    return ModelGeometry(
        path=path,
        architecture=architecture,
        name=_text(reader, "general.name") or path.stem,
        n_layer=layers,
        n_head=max(heads),
        heads_per_layer=heads,
        kv_heads_per_layer=kv_heads,
        head_dim_k=default_dim if key_length is None else key_length,
        head_dim_v=default_dim if value_length is None else value_length,
        n_ctx_train=_required(reader, f"{architecture}.context_length"),
        n_vocab=_vocabulary_size(reader, architecture),
        weights_bytes=reader.type_bytes.total(),
        file_bytes=file_bytes,
        weight_types=tuple(reader.type_bytes.most_common()),
        activation=_activation(reader),
    )


def _activation(reader: _HeaderReader) -> str | None:
    activation = _text(reader, ACTIVATION_KEY)
    if activation is None or activation in ACTIVATIONS:
        return activation
    raise UnsupportedModelError(
        f"{reader.path}: its {ACTIVATION_KEY} is {activation[:40]!r}, which is none of "
        f"{', '.join(ACTIVATIONS)}; update entropykv or convert the model again"
    )


def _text(reader: _HeaderReader, key: str) -> str | None:
    field = reader.get_field(key)
    if field is None:
        return None
    if field.types != [GGUFValueType.STRING]:
        raise ValueError(f"{key} is not a text")
    return str(field.contents())


def _integers(reader: _HeaderReader, key: str) -> npt.NDArray[Any] | None:
    """Return the integer or integers under a key, each between 0 and 2^31 - 1."""
    field = reader.get_field(key)
    if field is None:
        return None
    values = field.parts[field.data[0]] if field.data else np.empty(0)
    if values.dtype.kind not in "iu" or GGUFValueType.STRING in field.types:
        raise ValueError(f"{key} is not an integer")
    if values.size == 0 or values.min() < 0 or values.max() > _MAX_NUMBER:
        raise ValueError(f"{key} has impossible values")
    return values


def _number(reader: _HeaderReader, key: str) -> int | None:
    values = _integers(reader, key)
    if values is None:
        return None
    if values.size != 1:
        raise ValueError(f"{key} has {values.size} values, not one")
    return int(values[0])


def _required(reader: _HeaderReader, key: str) -> int:
    value = _number(reader, key)
    if value is None:
        raise ModelFileError(f"{reader.path}: lacks {key}; {_AGAIN}")
    if value == 0:
        raise ValueError(f"{key} is 0")
    return value


def _per_layer(reader: _HeaderReader, key: str, n_layer: int) -> tuple[int, ...] | None:
    """One value per layer, from a number for all layers or an array."""
    values = _integers(reader, key)
    if values is None:
        return None
    field = reader.fields[key]
    if field.types[0] != GGUFValueType.ARRAY:
        return (int(values[0]),) * n_layer
    if values.size != n_layer:
        raise ValueError(f"{key} has {values.size} values for {n_layer} layers")
    return tuple(int(value) for value in values)


def _vocabulary_size(reader: _HeaderReader, architecture: str) -> int:
    """Count the tokens of the tokenizer, else what the metadata says, else 0."""
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if tokens is not None and tokens.types[0] == GGUFValueType.ARRAY:
        return int(tokens.parts[4][0])  # parts: key length, key, type, item type, length, ...
    return _number(reader, f"{architecture}.vocab_size") or 0
