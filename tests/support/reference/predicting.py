"""What is predicted of entries from their keys and values, and what predictors are fitted to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.reference.rope import Rope, rope_pairs, rotated
from tests.support.reference.values import Floats

LEAST_PREDICTION = 1e-6
LEAST_OBSERVED = 1e-5
LEAST_NORM = 1e-6
LEAST_SHARE = 2.0**-20
"""What a stored share is at least; predictions are above it."""
SHARE_ROUNDING = 2.0**-8
"""By how much of itself the store rounds a share, at most."""


def features(
    k: npt.NDArray[Any], v: npt.NDArray[Any] | None, rope_positions: npt.NDArray[Any], rope: Rope
) -> Floats:
    """Of entries [n][k_dim], [n][v_dim] that RoPE saw at so many positions: [n][n_features].

    `v` None where it is a part of the key.
    """
    before = rotated(k, -rope_positions, rope)
    pairs = [np.hypot(before[:, i], before[:, j]) for i, j in rope_pairs(rope)]
    logs = [
        np.log(np.linalg.norm(rows, axis=1) + LEAST_NORM) for rows in (k, v) if rows is not None
    ]
    columns = [*before.T, *([] if v is None else v.T), *pairs, *logs, np.ones(len(k))]
    return np.stack(columns, axis=1).astype(np.float64)


def predicted(of_entries: Floats, weights: npt.NDArray[Any]) -> Floats:
    """Shares of attention, of features [n][n_features] and weights [n_features]; not rounded."""
    logarithms = of_entries @ weights.astype(np.float64)
    return np.exp(np.clip(logarithms, np.log(LEAST_PREDICTION), 0.0))


def lesson_sums(of_entries: Floats, observed: npt.NDArray[Any]) -> Floats:
    """The sum of outer products of entries' features and the logarithm of what they got."""
    targets = np.log(np.maximum(observed, LEAST_OBSERVED))
    rows = np.concatenate([of_entries, targets[:, None]], axis=1)
    return np.asarray(rows.T @ rows)
