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

    Computed in float32, as in the store, so that halves round in the same direction.
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


def stored(rows: npt.NDArray[Any], kv_type: str) -> Floats:
    """Return rows of K or V as attention reads them back from the store."""
    return {"f16": round_f16, "q8_0": round_q8_0}[kv_type](rows)
