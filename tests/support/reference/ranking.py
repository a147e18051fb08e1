"""Compute the importance of entries, and which of them survive an eviction."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.reference.attending import SCORING_INTERVAL
from tests.support.reference.values import Bools, Floats, Ints

DECODE_ROOM = 16  # The tokens for which one eviction makes room in a small budget.
MOST_DECODE_ROOM = 64


def updated_importance(
    importance: Floats,
    observed: Floats,
    decay: float,
    window: int,
    first_position: int,
    *,
    interval: int = SCORING_INTERVAL,
) -> Floats:
    """Return the importance of entries [T] after a micro-batch, whose queries gave `observed`
    [n][T].

    Only the last `window` queries count. If tokens come one by one, only every fourth one
    (`interval`) counts, with fourfold weight.
    """
    n_tokens = len(observed)
    weights = np.ones(n_tokens)
    if n_tokens == 1:
        if first_position % interval != 0:
            return importance
        n_tokens, weights = interval, np.full(1, float(interval))
    kept = decay**n_tokens if decay > 0.0 else 0.0
    updated: Floats = importance * kept + (weights[:, None] * observed)[-window:].sum(axis=0)
    return updated


def recency_score(position: int, newest: int, variation: float) -> float:
    """Return README_ENTROPY_KV's score; as in the store, float32 decides which positions are the
    newest tenth.
    """
    span = max(newest, 1)
    distance = newest - position
    in_newest_tenth = np.float32(distance) < np.float32(0.1) * np.float32(span)
    alpha = 2.0 / (span * (1.0 + variation))
    return float(np.exp(-alpha * distance)) + (0.5 if in_newest_tenth else 0.0)


def protected(positions: Ints, newest: int, n_sinks: int, recent_window: int) -> Bools:
    """Return which entries are protected: sinks and the recent window."""
    return (positions < n_sinks) | (positions > newest - recent_window)


def select_survivors(
    scores: npt.NDArray[Any], positions: Ints, keep: int, n_sinks: int, recent: int, newest: int
) -> Bools:
    """Return which entries survive, (n,): the protected ones, then the highest scores, up to
    `keep`.

    Of equal scores, the first one survives.
    """
    kept = protected(positions, newest, n_sinks, recent)
    for index in np.argsort(-scores, kind="stable"):
        if kept.sum() >= keep:
            break
        kept[index] = True
    return kept


def entries_to_keep(budget: int, n_new: int, n_sinks: int, recent_window: int) -> int:
    """Return how many entries an eviction leaves.

    If tokens come one by one, it leaves room for several of them.
    """
    beyond_protection = budget - n_sinks - recent_window
    most = min(max(beyond_protection // 64, DECODE_ROOM), MOST_DECODE_ROOM)
    room = min(max(beyond_protection // 4, 1), most)
    return budget - max(room - n_new, 0)
