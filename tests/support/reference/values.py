"""Define array types of the oracle, and round K and V as the store does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
F16_LARGEST = 65504.0
QUANT_BLOCK = 32  # The values of a row that share one scale in q8_0.


def round_f16(values: npt.NDArray[Any]) -> Floats:
    """Round to the nearest f16; larger values become the largest f16."""
    clipped = np.clip(values.astype(np.float32), -F16_LARGEST, F16_LARGEST)
    return clipped.astype(np.float16).astype(np.float64)


def round_q8_0(rows: npt.NDArray[Any]) -> Floats:
    """Round rows [..., dim] to int8 times a scale per 32 values; the scale is max |x| / 127 in f16.

    Values are float32, as in the store, so that halves round in the same direction.
    """
    result = np.zeros(rows.shape)
    for first in range(0, rows.shape[-1], QUANT_BLOCK):
        block = rows[..., first : first + QUANT_BLOCK].astype(np.float32)
        limit = np.abs(block).max(axis=-1, keepdims=True)
        scale = round_f16(limit / np.float32(127.0)).astype(np.float32)
        safe = np.where(scale > 0.0, scale, np.float32(1.0))
        steps = np.where(scale > 0.0, block * (np.float32(1.0) / safe), np.float32(0.0))
        steps = np.clip(steps, np.float32(-127.0), np.float32(127.0))
        away_from_zero = np.trunc(steps + np.copysign(np.float32(0.5), steps))
        result[..., first : first + QUANT_BLOCK] = away_from_zero.astype(np.float64) * scale
    return result


LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""The levels of iq4_nl, as ggml has them."""


def turned_blocks(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Rotate every block of 32 values by a Hadamard matrix divided by the root of its size, which
    is its own inverse. Values are float32, and added in the order of the store.
    """
    blocks = rows.astype(np.float32) * np.float32(1.0 / np.sqrt(QUANT_BLOCK))
    blocks = blocks.reshape(*rows.shape[:-1], -1, QUANT_BLOCK)
    for _ in range(QUANT_BLOCK.bit_length() - 1):
        even, odd = blocks[..., ::2], blocks[..., 1::2]
        blocks = np.concatenate([even + odd, even - odd], axis=-1)
    return blocks.reshape(rows.shape)


def round_iq4_nl(rows: npt.NDArray[Any]) -> Floats:
    """Round rotated blocks of 32 values to one of 16 levels times an f16 scale, and rotate them
    back; rows [..., dim].

    At first the value of the largest magnitude is the lowest level. Then the scale is the one with
    the least squared error for these levels, of values that are rounded to 16-bit integers.
    """
    dim = rows.shape[-1]
    padding = [(0, 0)] * (rows.ndim - 1) + [(0, -dim % QUANT_BLOCK)]
    turned = turned_blocks(np.pad(rows.astype(np.float32), padding))
    blocks = turned.reshape(*turned.shape[:-1], -1, QUANT_BLOCK)
    highest, lowest = blocks.max(axis=-1, keepdims=True), -blocks.min(axis=-1, keepdims=True)
    limit = np.maximum(highest, lowest)
    empty = limit <= np.float32(1e-30)
    limit = np.where(empty, np.float32(1.0), limit)
    first = np.where(highest < lowest, -limit, limit) / LEVELS[0]
    levels = _nearest(blocks * (np.float32(1.0) / first))
    integers = np.rint(blocks * (np.float32(32767.0) / limit)).astype(np.int64)
    products = (integers * levels.astype(np.int64)).sum(axis=-1, keepdims=True).astype(np.float32)
    squares = (levels**2).sum(axis=-1, keepdims=True).astype(np.float32)
    wanted = limit / np.float32(32767.0) * (products / squares)
    scale = round_f16(np.where(empty, np.float32(0.0), wanted)).astype(np.float32)
    safe = np.where(scale == 0.0, np.float32(1.0), scale)
    steps = np.where(scale == 0.0, np.float32(0.0), blocks * (np.float32(1.0) / safe))
    kept = (_nearest(steps) * scale).reshape(turned.shape)
    return turned_blocks(kept)[..., :dim].astype(np.float64)


def _nearest(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the nearest level of every value, the lower one of two."""
    return LEVELS[np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, values)]


_ROUNDINGS = {"f16": round_f16, "q8_0": round_q8_0, "iq4_nl": round_iq4_nl}


def stored(rows: npt.NDArray[Any], kv_type: str) -> Floats:
    """Return rows of K as attention reads them back from the store."""
    return _ROUNDINGS[kv_type.split("/", maxsplit=1)[0]](rows)


def stored_values(rows: npt.NDArray[Any], kv_type: str) -> Floats:
    """Return rows of V as attention reads them back from the store."""
    return _ROUNDINGS[kv_type.rsplit("/", maxsplit=1)[-1]](rows)
