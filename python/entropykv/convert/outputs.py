"""Plan a converted file: each tensor of the source becomes one or two tensors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from llama_cpp._ggml import libggml

from entropykv.convert.decoder import HEAD
from entropykv.convert.source import (
    EMBEDDING,
    FLOAT_TYPES,
    FileTensor,
    Source,
    Tensor,
    TernaryTensor,
)
from entropykv.convert.ternary import Bytes, Floats, Ternary, pack_q4_0, pack_tq2_0
from entropykv.errors import EntropyKVError, ModelFileError, SettingsError

WEIGHT_TYPES = ("tq2_0", "q4_0", "f16", "f32")
EMBEDDING_TYPES = ("q6_k", "q8_0", "f16", "f32", "keep")

_quantize_chunk = libggml.ggml_quantize_chunk
_quantize_chunk.restype = ctypes.c_size_t
_quantize_chunk.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
]


@dataclass(frozen=True)
class OutputTensor:
    """Describe a tensor to be written; `chunks` reads and converts its data, and yields the bytes
    in order.

    `copied` is true if the bytes equal those of the source.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[Bytes]]
    copied: bool = False

    @property
    def n_bytes(self) -> int:
        """Return the size in the file, in bytes, without padding."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes


def plan_outputs(
    source: Source, weight_type: str, embedding_type: str | None
) -> list[OutputTensor]:
    """Choose the type of every tensor; raises SettingsError for an impossible `embedding_type`.

    The embedding and the output head get that type (None: see convert()), vectors F32, ternary
    matrices that of ternary_kind(), with an output for the scale: see _ternary(). Others keep their
    type if source.keeps_types, or else get `weight_type`.
    """
    outputs: list[OutputTensor] = []
    plain = partial(_plain, source.path)
    for name, tensor in source.tensors.items():
        if name in (EMBEDDING, HEAD):
            outputs.append(_embedding(source.path, name, tensor, embedding_type))
        elif len(tensor.shape) == 1:
            divisor = _bias_divisor(source, name, weight_type)
            outputs.append(plain(name, tensor, Kind.F32, divisor))
        elif isinstance(tensor, TernaryTensor):
            outputs += _ternary(source.path, name, tensor, weight_type)
        elif isinstance(tensor, FileTensor) and source.keeps_types:
            outputs.append(_copy(name, tensor))
        else:
            outputs.append(plain(name, tensor, _kind(weight_type)))
    return outputs


def _embedding(path: Path, name: str, tensor: Tensor, wanted: str | None) -> OutputTensor:
    stored = tensor.kind if isinstance(tensor, FileTensor) else None
    row = tensor.shape[-1]
    if wanted is None:
        keeps = stored is not None and stored not in FLOAT_TYPES
        wanted = "keep" if keeps else embedding_kind(row).name.lower()
    if wanted == "keep":
        if not isinstance(tensor, FileTensor):
            raise SettingsError("I2_S embeddings cannot be kept; choose another --embedding-type")
        return _copy(name, tensor)
    block = GGML_QUANT_SIZES[_kind(wanted)][0]
    if row % block != 0:
        raise SettingsError(
            f"--embedding-type {wanted} needs rows of a multiple of {block} elements, but "
            f"{name} has {row}; choose f16 or leave the option out"
        )
    return _plain(path, name, tensor, _kind(wanted))


def embedding_kind(row: int) -> Kind:
    """Return the first type that rows of this length fit into; it is the default for embedding and
    head.
    """
    kinds = (_kind(name) for name in EMBEDDING_TYPES if name != "keep")
    return next(kind for kind in kinds if row % GGML_QUANT_SIZES[kind][0] == 0)


def _kind(name: str) -> Kind:
    return Kind[name.upper()]


def _copy(name: str, tensor: FileTensor) -> OutputTensor:
    return OutputTensor(name, tensor.kind, tensor.shape, tensor.raw_chunks, copied=True)


def _plain(
    path: Path, name: str, tensor: Tensor, kind: Kind, divisor: TernaryTensor | None = None
) -> OutputTensor:
    # Read F32 values (norms) instead of copying their bytes, so that damaged values are found.
    if isinstance(tensor, FileTensor) and tensor.kind == kind != Kind.F32 and divisor is None:
        return _copy(name, tensor)

    def chunks() -> Iterator[Bytes]:
        scale = np.float32(1.0) if divisor is None else divisor.scale()
        for values in tensor.float_chunks():
            # Suppress numpy's warnings of damaged values, because the check below reports them by
            # name.
            with np.errstate(invalid="ignore", over="ignore"):
                divided = values / scale
            yield quantized(f"{path}: tensor {name}", divided, kind)

    return OutputTensor(name, kind, tensor.shape, chunks)


def _bias_divisor(source: Source, name: str, weight_type: str) -> TernaryTensor | None:
    """Return the weight whose scale a bias must be divided by; None if it stays as it is.

    In the feed-forward layer, llama.cpp adds the bias first and multiplies by the scale afterwards.
    """
    projection = name.removesuffix(".bias")
    weight = source.tensors.get(f"{projection}.weight")
    if name == projection or ".ffn_" not in name or not isinstance(weight, TernaryTensor):
        return None
    return None if ternary_kind(weight.shape[-1], weight_type) == Kind.F32 else weight


def _ternary(path: Path, name: str, tensor: TernaryTensor, weight_type: str) -> list[OutputTensor]:
    """Make two outputs: the weight with a block scale of 1, and its exact scale as a tensor of its
    own. For F32, make one: the scaled weight.
    """
    kind = ternary_kind(tensor.shape[-1], weight_type)
    if kind == Kind.F32:
        return [_plain(path, name, tensor, kind)]

    def scale() -> Iterator[Bytes]:
        yield np.array([tensor.scale()], dtype="<f4").view(np.uint8)

    packers: dict[Kind, Callable[[Ternary], Bytes]] = {
        Kind.TQ2_0: pack_tq2_0,
        Kind.Q4_0: pack_q4_0,
        Kind.F16: lambda ternary: ternary.astype("<f2").view(np.uint8),
    }

    def weight(pack: Callable[[Ternary], Bytes]) -> Iterator[Bytes]:
        yield from map(pack, tensor.ternary_chunks())

    return [
        OutputTensor(name, kind, tensor.shape, partial(weight, packers[kind])),
        OutputTensor(f"{name.removesuffix('.weight')}.scale", Kind.F32, (1,), scale),
    ]


def ternary_kind(row: int, weight_type: str = WEIGHT_TYPES[0]) -> Kind:
    """Return the wanted type, or the next one in WEIGHT_TYPES that a row of this length
    fits into.
    """
    candidates = WEIGHT_TYPES[WEIGHT_TYPES.index(weight_type) :]
    return next(k for k in map(_kind, candidates) if row % GGML_QUANT_SIZES[k][0] == 0)


def quantized(label: str, values: Floats, kind: Kind) -> Bytes:
    """Quantise floats, (rows, columns), to the bytes of another type, (rows, bytes of a row). For
    F32 and F16, `values` may have any shape, whose last axis becomes bytes.

    ggml's own quantiser does the work, since gguf's lacks Q6_K. Raises ModelFileError where the
    values do not fit the type; `label` names the tensor in it.
    """
    values = np.ascontiguousarray(values, dtype=np.float32)
    if kind == Kind.F32:
        _check_finite(label, values)
        return values.astype("<f4", copy=False).view(np.uint8)
    if kind == Kind.F16:
        with np.errstate(over="ignore"):
            converted = values.astype("<f2")
        _check_finite(label, converted)
        return converted.view(np.uint8)
    _check_finite(label, values)
    rows, columns = values.shape
    block, block_bytes = GGML_QUANT_SIZES[kind]
    target = np.empty((rows, columns // block * block_bytes), dtype=np.uint8)
    written = _quantize_chunk(
        int(kind), values.ctypes.data, target.ctypes.data, 0, rows, columns, None
    )
    if written != target.nbytes:
        raise EntropyKVError(f"{label} was quantised to {written} bytes, not {target.nbytes}")
    return target


def _check_finite(label: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise ModelFileError(
            f"{label} has values that are not finite or too large for the type; "
            "choose f32 or download the model again"
        )
