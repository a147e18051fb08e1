"""Decide how keys with biases are stored: what is subtracted from them, and in which units."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.reference.rope import Rope, rope_frequencies, rope_pairs
from tests.support.reference.values import Floats, stored

CENTRED_POSITIONS = 8192
UNIT_POWER = 0.75
MOST_RATIO = 256.0


class KeyCentre(NamedTuple):
    """Hold the centre that is subtracted from a key, and units that divide the rest: [k_dim]."""

    centre: Floats
    unit: Floats


def key_centre(
    bias: npt.NDArray[Any], spread: npt.NDArray[Any], rope: Rope, magnitude: float
) -> KeyCentre:
    """Return how the keys of a KV head are stored.

    The centre is the mean of the rotated bias over the first positions; units follow the size of
    what is left.
    """
    centre = np.asarray(bias, np.float64).copy()
    size = np.abs(np.asarray(spread, np.float64))
    positions = np.arange(CENTRED_POSITIONS)
    for (first, second), frequency in zip(rope_pairs(rope), rope_frequencies(rope), strict=True):
        turned = magnitude * (bias[first] + 1j * bias[second]) * np.exp(1j * positions * frequency)
        mean = turned.mean()
        centre[first], centre[second] = mean.real, mean.imag
        left = np.mean(np.abs(turned - mean) ** 2)
        rest = magnitude**2 * (spread[first] ** 2 + spread[second] ** 2)
        size[first] = size[second] = np.sqrt((left + rest) / 2.0)
    return KeyCentre(centre, np.maximum(size, size.max() / MOST_RATIO) ** UNIT_POWER)


def stored_keys(keys: npt.NDArray[Any], kv_type: str, centres: npt.NDArray[Any] | None) -> Floats:
    """Return keys [n][n_head_kv][k_dim] as attention reads them back.

    `centres`: [n_head_kv][2][k_dim], centre and unit of each KV head; None: keys have no centres.
    """
    if centres is None:
        return stored(keys, kv_type)
    centre, unit = (centres[:, part].astype(np.float32) for part in range(2))
    return stored((keys.astype(np.float32) - centre) / unit, kv_type) * unit + centre
