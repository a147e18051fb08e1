"""Write a description as a GGUF file: metadata, vocabulary, random weights."""

from __future__ import annotations

import hashlib
import os
import tempfile
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType, GGUFWriter

from tests.architectures.description import Architecture, Value
from tests.architectures.tensors import tensors_of
from tests.support.tiny_writer import (
    DOWN_SCALE,
    KEY_SCALE,
    LOGIT_SCALE,
    OUTPUT_SCALE,
    QUERY_SCALE,
    VALUE_SCALE,
    add_tokenizer,
)

FloatArray = npt.NDArray[np.float32]

# Mean and standard deviation of weights by name; the first pattern that matches counts. The
# deviation is that of each output for an input of unit size. If the mean is not zero or the tensor
# is a vector, it is that of the weights themselves.
_WEIGHTS: tuple[tuple[str, float, float], ...] = (
    ("token_embd.weight", 0.0, 1.0),
    ("position_embd.weight", 0.0, 1.0),
    ("*norm*.weight", 1.0, 0.1),
    ("*.ssm_d*", 1.0, 0.1),
    ("*scale*", 1.0, 0.1),
    ("*attn_sinks*", 0.0, 1.0),
    ("*.bias", 0.0, 0.1),
    ("*attn_qkv.weight", 0.0, (QUERY_SCALE + VALUE_SCALE) / 2),
    ("*attn_q*.weight", 0.0, QUERY_SCALE),
    ("*attn_k*.weight", 0.0, KEY_SCALE),
    ("*attn_output*.weight", 0.0, OUTPUT_SCALE),
    ("*down*.weight", 0.0, DOWN_SCALE),
    ("output.weight", 0.0, LOGIT_SCALE),
    ("*", 0.0, 1.0),
)


def write_architecture(path: str | os.PathLike[str], description: Architecture) -> None:
    """Write the file; equal descriptions give equal bytes."""
    shapes = _shapes(description)
    writer = _header(path, description)
    tied = "output.weight" not in shapes
    for name, shape in shapes.items():
        writer.add_tensor(name, _weights(name, shape, tied))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(description: Architecture) -> dict[str, tuple[int, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "metadata.gguf"
        writer = _header(metadata, description)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        shapes = tensors_of(metadata)
    return {
        name: shape
        for name, shape in shapes.items()
        if not any(fnmatch(name, pattern) for pattern in description.without)
    }


def _header(path: str | os.PathLike[str], description: Architecture) -> GGUFWriter:
    writer = GGUFWriter(path, description.architecture)
    for key, value in description.metadata.items():
        _add_value(writer, _full_key(description.architecture, key), value)
    add_tokenizer(writer, description.n_vocab)
    return writer


def _full_key(architecture: str, key: str) -> str:
    return key if key.startswith("xielu.") else f"{architecture}.{key}"


def _add_value(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif ".ple." in key and len(value) > 1:
        writer.add_key_value(key, list(value), GGUFValueType.ARRAY, GGUFValueType.UINT64)
    else:
        writer.add_array(key, list(value))


def _weights(name: str, shape: tuple[int, ...], tied: bool) -> FloatArray:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).standard_normal(shape)
    if name.startswith(("rope_freqs", "rope_factors")) or ".rope_f" in name:
        return np.linspace(1.0, 4.0, values.size, dtype=np.float32).reshape(shape)
    if name.endswith(".ssm_a"):  # Recurrent layers decay by it.
        return (-0.01 - 0.1 * np.abs(values)).astype(np.float32)
    mean, deviation = next((m, d) for p, m, d in _WEIGHTS if fnmatch(name, p))
    if name == "token_embd.weight" and tied:  # The embedding is also the output head.
        deviation = LOGIT_SCALE / np.sqrt(shape[-1])
    elif mean == 0.0 and len(shape) > 1 and "embd" not in name:
        deviation /= np.sqrt(shape[-1])
    return (mean + deviation * values).astype(np.float32)
