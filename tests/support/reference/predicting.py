"""Predict shares of attention from keys and values, and sum up what predictors are fitted to."""

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
"""The smallest share that the store holds; predicted shares are larger."""
SHARE_ROUNDING = 2.0**-8
"""The largest relative rounding error of a share in the store."""


def features(
    k: npt.NDArray[Any], v: npt.NDArray[Any] | None, rope_positions: npt.NDArray[Any], rope: Rope
) -> Floats:
    """Return features [n][n_features] of keys [n][k_dim] and values [n][v_dim] at RoPE positions
    [n].

    `v` is None if it is a part of the key.
    """
    before = rotated(k, -rope_positions, rope)
    pairs = [np.hypot(before[:, i], before[:, j]) for i, j in rope_pairs(rope)]
    logs = [
        np.log(np.linalg.norm(rows, axis=1) + LEAST_NORM) for rows in (k, v) if rows is not None
    ]
    columns = [*before.T, *([] if v is None else v.T), *pairs, *logs, np.ones(len(k))]
    return np.stack(columns, axis=1).astype(np.float64)


def predicted(of_entries: Floats, weights: npt.NDArray[Any]) -> Floats:
    """Return shares of attention [n] before rounding, for features [n][n_features] and weights
    [n_features].
    """
    logarithms = of_entries @ weights.astype(np.float64)
    return np.exp(np.clip(logarithms, np.log(LEAST_PREDICTION), 0.0))


def lesson_sums(of_entries: Floats, observed: npt.NDArray[Any]) -> Floats:
    """Return the sum of the outer products of all (features, log attention) with themselves."""
    targets = np.log(np.maximum(observed, LEAST_OBSERVED))
    rows = np.concatenate([of_entries, targets[:, None]], axis=1)
    return np.asarray(rows.T @ rows)
