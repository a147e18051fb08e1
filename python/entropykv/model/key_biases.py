"""Read what a model adds to the keys of every layer, and by how much the rest of them varies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, dequantize

from entropykv.model.geometry import ModelGeometry, key_bias_of
from entropykv.model.header import HeaderReader, check_prefix, damage_named
from entropykv.model.identity import parts_of

_COLUMNS = 256
"""How many columns of a projection are read: as many as the largest block of a type has values.
They tell the norms of its rows within a few percent.
"""

_Floats = npt.NDArray[np.float32]


class _Columns(NamedTuple):
    n_rows: int
    n_all: int
    """How many columns the matrix has."""
    values: _Floats | None
    """The first columns, [n_rows][columns]; None where nobody can read their type."""


@dataclass(frozen=True)
class KeyBias:
    """Hold the bias of a layer's keys, and the standard deviations of what it is added to.

    Both are [n_head_kv][head_dim_k], float32, before RoPE. The deviations are those for inputs that
    do not depend on each other, as they leave the layer's norm.
    """

    bias: _Floats
    spread: _Floats


def read_key_biases(geometry: ModelGeometry) -> dict[int, KeyBias]:
    """Return the biases of keys by the number of the layer; layers without one are missing.

    Also missing are layers that change keys after their bias (by a norm), and those whose bias is
    too short, not finite, or in a part that is not there. Raises ModelFileError for a damaged file.
    """
    found: dict[int, KeyBias] = {}
    for part in parts_of(geometry.path):
        if not part.is_file():
            continue
        check_prefix(part)
        with damage_named(part):
            found.update(_biases_in(HeaderReader(part), geometry))
    return found


def _biases_in(reader: HeaderReader, geometry: ModelGeometry) -> Iterator[tuple[int, KeyBias]]:
    for layer, n_heads in enumerate(geometry.kv_heads_per_layer):
        name = key_bias_of(reader, layer)
        bias = None if name is None else reader.floats(f"{name}.bias")
        if name is None or bias is None:
            continue
        shape = (n_heads, geometry.head_dim_k)
        n_keys = n_heads * geometry.head_dim_k
        # In a joint projection, keys follow the queries.
        joint = name.endswith("qkv")
        first = geometry.heads_per_layer[layer] * geometry.head_dim_k if joint else 0
        if n_keys == 0 or bias.size < first + n_keys or not np.isfinite(bias).all():
            continue
        keys = slice(first, first + n_keys)
        weights = _first_columns(reader, f"{name}.weight", keys)
        spread = _spread(weights, reader.floats(f"blk.{layer}.attn_norm.weight"))
        yield layer, KeyBias(bias[keys].reshape(shape), spread.reshape(shape))


def _spread(columns: _Columns, norm: _Floats | None) -> _Floats:
    """Return the norm of each row of a projection, (n_rows,), whose columns are first multiplied by
    the weights of the RMS norm before it.

    The norms are estimated from the first columns. If the columns cannot be read, all norms are 1.
    """
    if columns.values is None:
        return np.ones(columns.n_rows, np.float32)
    values = columns.values.astype(np.float64)
    if norm is not None and norm.size == columns.n_all:
        values = values * norm[: values.shape[1]]
    spread = np.sqrt(np.square(values).sum(axis=1) * columns.n_all / values.shape[1])
    found: _Floats = np.nan_to_num(spread, nan=1.0, posinf=1.0).astype(np.float32)
    return found


def _first_columns(reader: HeaderReader, name: str, rows: slice) -> _Columns:
    """Return the first columns of some rows of a matrix."""
    n_rows = rows.stop - rows.start
    place = reader.places.get(name)
    if place is None or len(place.dims) != 2 or place.dims[1] < rows.stop:
        return _Columns(n_rows, 0, None)
    n_all = place.dims[0]
    block, block_bytes = GGML_QUANT_SIZES[place.type]
    n_blocks = min(n_all, _COLUMNS) // block
    stored = reader.data[place.offset : place.offset + place.n_bytes].reshape(place.dims[1], -1)
    try:
        part = np.ascontiguousarray(stored[rows, : n_blocks * block_bytes])
        return _Columns(n_rows, n_all, dequantize(part, place.type).reshape(n_rows, -1))
    except NotImplementedError:
        return _Columns(n_rows, n_all, None)
