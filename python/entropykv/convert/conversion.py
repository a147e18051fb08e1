"""Convert a 1.58-bit model to a GGUF file that stock llama.cpp loads.

Ternary weights stay exact: the values -1, 0 and 1 are stored as TQ2_0, Q4_0 or F16, and the F32
scale of a tensor in a tensor of its own beside it. Only F32 weights are stored with their scale.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType, GGUFWriter

from entropykv.convert.gguf_source import RawValue, read_gguf
from entropykv.convert.hf_source import read_hf
from entropykv.convert.outputs import (
    EMBEDDING_TYPES,
    WEIGHT_TYPES,
    OutputTensor,
    plan_outputs,
    quantized,
)
from entropykv.convert.source import CHUNK_ELEMENTS, Source, TernaryTensor
from entropykv.convert.ternary import I2S_LAYOUTS, pack_tq2_0, unpack_i2s
from entropykv.errors import EntropyKVError, ModelFileError, SettingsError, UnsupportedModelError
from entropykv.files import new_file
from entropykv.model.geometry import ACTIVATION_KEY, ACTIVATIONS

_COPIED_BYTES_PER_SECOND = 1 << 30
_CHUNK_BYTES_PER_ELEMENT = 24
"""Bytes of memory per element while its rows are converted: the floats or codes that were read, and
everything that is computed from them.
"""
_SAMPLE = (64, 1024)
_TERNARY = (Kind.TQ2_0, Kind.Q4_0)


@dataclass(frozen=True)
class Estimate:
    """Hold what a conversion needs: bytes of tensors to write, seconds, bytes of memory for
    weights.

    The vocabulary is not counted: a tokenizer.json of 128,000 tokens takes about as much memory
    again.
    """

    target_bytes: int
    seconds: float
    memory_bytes: int


def estimate(outputs: Sequence[OutputTensor]) -> Estimate:
    """Time a sample of each kind of work (some milliseconds), and extrapolate to all outputs."""
    elements: Counter[Kind] = Counter()
    n_bytes = sum(output.n_bytes for output in outputs)
    for output in outputs:
        if not output.copied:
            elements[output.kind] += math.prod(output.shape)
    seconds = n_bytes / _COPIED_BYTES_PER_SECOND
    seconds += sum(count * _seconds_per_element(kind) for kind, count in elements.items())
    return Estimate(n_bytes, seconds, _CHUNK_BYTES_PER_ELEMENT * CHUNK_ELEMENTS)


def _seconds_per_element(kind: Kind) -> float:
    random = np.random.default_rng(0)
    if kind in _TERNARY:
        codes = random.integers(0, 256, math.prod(_SAMPLE) // 4, dtype=np.uint8)
        start = time.perf_counter()
        pack_tq2_0(unpack_i2s(codes, _SAMPLE))
    else:
        values = random.standard_normal(_SAMPLE, dtype=np.float32)
        start = time.perf_counter()
        quantized("a sample", values, kind)
    return (time.perf_counter() - start) / math.prod(_SAMPLE)


Progress = Callable[[int, int], None]
Started = Callable[[Estimate], None]

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37}
"""The number (llama_ftype in llama.h) that a file declares for the type that most of its weights
have.
"""
_ALIGNMENT = 32
_HEADER_ROOM = 1 << 20
# GGUFWriter uses raw_dtype instead, and takes shapes as they are, unlike for uint8.
_RAW = np.dtype(np.void)


@dataclass(frozen=True)
class ConversionSummary:
    """Hold the result of a conversion; `tensor_types` has pairs (type, number of tensors), in the
    order of the largest tensor of each type, the largest first.
    """

    source: Path
    target: Path
    architecture: str
    activation: str
    tensor_types: tuple[tuple[str, int], ...]
    source_bytes: int
    target_bytes: int


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    weight_type: str | None = None,
    embedding_type: str | None = None,
    i2s_layout: str = "x86",
    activation: str = "auto",
    force: bool = False,
    progress: Progress | None = None,
    started: Started | None = None,
) -> ConversionSummary:
    """Convert an I2_S file, a BitNet GGUF or a Hugging Face directory to `target`.

    `weight_type`: tq2_0 (the default), q4_0, f16 or f32; a tensor whose rows do not fit gets the
    next of these. f16 and f32 keep the master weights of a Hugging Face model unchanged; the others
    quantise them. `embedding_type`: q6_k, q8_0, f16, f32 or keep; None takes the first that fits,
    and keeps an embedding that is already quantised. `i2s_layout`: x86, arm64 or rows4.
    `activation`: relu2, silu, or auto, which takes the activation that the model declares.
    `started` is called with an Estimate before the work starts, and `progress` with (bytes written,
    bytes in total) during it.

    `force`: an existing `target` is replaced. If the conversion fails, no new file is left. Raises
    ModelFileError for a damaged source, UnsupportedModelError for a model that cannot be converted,
    and SettingsError for an option or target that cannot be used.
    """
    source, target = Path(source), Path(target)
    _check_options(weight_type, embedding_type, i2s_layout, activation)
    _check_target(source, target, force)
    model = _read(source, weight_type, i2s_layout)
    activation = _activation(model, activation)
    outputs = plan_outputs(model, weight_type or WEIGHT_TYPES[0], embedding_type)
    if started is not None:
        started(estimate(outputs))
    try:
        with new_file(target) as part:
            _write(model, activation, outputs, part, progress)
            target_bytes = part.stat().st_size
    except OSError as error:
        raise _unwritable(target, error) from error
    kinds: Counter[str] = Counter()
    for output in sorted(outputs, key=lambda output: -output.n_bytes):
        kinds[output.kind.name] += 1
    return ConversionSummary(
        source=source,
        target=target,
        architecture=model.architecture,
        activation=activation,
        tensor_types=tuple(kinds.items()),
        source_bytes=model.n_bytes,
        target_bytes=target_bytes,
    )


def _activation(model: Source, wanted: str) -> str:
    activation = model.activation if wanted == "auto" else wanted
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{model.path}: has the activation {activation!r}, but a 1.58-bit model has one of "
            f"{', '.join(ACTIVATIONS)}; if it is one of them, say so with --activation"
        )
    return activation


def _main_type(outputs: list[OutputTensor]) -> str:
    """Return the type of most bytes of the layers, which the file declares as its type."""
    sizes: Counter[str] = Counter()
    for output in outputs:
        if output.name.startswith("blk."):
            sizes[output.kind.name] += output.n_bytes
    return sizes.most_common(1)[0][0]


def _check_options(
    weight_type: str | None, embedding_type: str | None, i2s_layout: str, activation: str
) -> None:
    for name, value, allowed in (
        ("weight_type", weight_type, (None, *WEIGHT_TYPES)),
        ("embedding_type", embedding_type, (None, *EMBEDDING_TYPES)),
        ("i2s_layout", i2s_layout, I2S_LAYOUTS),
        ("activation", activation, ("auto", *ACTIVATIONS)),
    ):
        if value not in allowed:
            choices = ", ".join(choice for choice in allowed if choice is not None)
            raise SettingsError(f"{name} cannot be {value!r}; use one of {choices}")


def _check_target(source: Path, target: Path, force: bool) -> None:
    """Check before the conversion starts that its result can be written to `target`."""
    try:
        if not source.exists():
            raise ModelFileError(
                f"{source}: no such file; give a GGUF file or the directory of a Hugging Face model"
            )
        if not target.exists():
            if not target.parent.is_dir():
                raise SettingsError(f"{target.parent}: no such directory; make it first")
        elif target.samefile(source):
            raise SettingsError(f"{target}: is the model itself; give another path for the output")
        elif not target.is_file():
            kind = "a directory" if target.is_dir() else "not a regular file"
            raise SettingsError(f"{target}: is {kind}; give the path of a new file")
        elif not force:
            raise SettingsError(f"{target}: exists already; give another path, or --force")
    except OSError as error:  # A name is too long, for example.
        raise _unwritable(target, error) from error


def _read(path: Path, weight_type: str | None, i2s_layout: str) -> Source:
    if path.is_dir():
        return read_hf(path, dense=weight_type in {"f16", "f32"})
    model = read_gguf(path, i2s_layout=i2s_layout)
    if weight_type and not any(isinstance(t, TernaryTensor) for t in model.tensors.values()):
        raise SettingsError(
            f"{path}: has no I2_S weights, so its weights are copied; leave --weight-type out"
        )
    return model


def _unwritable(target: Path, error: OSError) -> SettingsError:
    reason = error.strerror or error
    return SettingsError(f"{target}: cannot be written ({reason}); choose another place")


class _Writer(GGUFWriter):
    """Write GGUF files as GGUFWriter does, and also copy values as raw bytes of another file."""

    def _pack_val(
        self,
        val: Any,
        vtype: GGUFValueType,
        add_vtype: bool,
        sub_type: GGUFValueType | None = None,
    ) -> bytes:
        if isinstance(val, RawValue):
            return bytes(self._pack("I", vtype)) + val.data
        packed: bytes = super()._pack_val(val, vtype, add_vtype, sub_type)
        return packed


def _write(
    model: Source,
    activation: str,
    outputs: list[OutputTensor],
    part: Path,
    progress: Progress | None,
) -> None:
    total = sum(output.n_bytes for output in outputs)
    free = shutil.disk_usage(part.parent).free
    if total + _HEADER_ROOM > free:
        raise SettingsError(
            f"{part.parent}: has {free / 2**20:.0f} MiB free, but the converted model needs "
            f"{total / 2**20:.0f}; choose another place"
        )
    _write_header(model, activation, outputs, part)
    with open(part, "ab") as file:
        _pad(file)
        done = 0
        for output in outputs:
            start = file.tell()
            for chunk in output.chunks():
                chunk.tofile(file)
                done += chunk.nbytes
                if progress is not None:
                    progress(done, total)
            if file.tell() != start + output.n_bytes:
                raise EntropyKVError(f"tensor {output.name} came out with a wrong size")
            _pad(file)


def _write_header(model: Source, activation: str, outputs: list[OutputTensor], part: Path) -> None:
    """Write the metadata, and the name, type and shape of every tensor, before any tensor data."""
    writer = _Writer(part, model.target_architecture)
    try:
        model.add_metadata(writer)
        writer.add_string(ACTIVATION_KEY, activation)
        file_type = _FILE_TYPES.get(_main_type(outputs))
        if file_type is not None:
            writer.add_file_type(file_type)
        writer.add_quantization_version(2)
        for output in outputs:
            writer.add_tensor_info(
                output.name, output.shape, _RAW, output.n_bytes, raw_dtype=output.kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))
