"""Compute the importance of entries, and which of them survive an eviction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.reference.attending import SCORING_INTERVAL
from tests.support.reference.rope import Rope, rope_pairs, rotated
from tests.support.reference.values import Bools, Floats, Ints

DECODE_ROOM = 16  # The most entries that one eviction makes room for.


def updated_importance(
    importance: Floats,
    observed: Floats,
    decay: float,
    window: int,
    first_position: int,
    *,
    interval: int = SCORING_INTERVAL,
) -> Floats:
    """Return importance after a micro-batch of n tokens whose last `window` queries gave `observed`
    [n][T].

    If tokens come one by one, only every fourth (`interval`) counts, four times.
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


@dataclass
class QueryStatistics:
    """Hold the queries that a KV head's group has read so far, rotated back to position 0."""

    rope: Rope
    decay: float
    queries: list[npt.NDArray[Any]] = field(default_factory=list)
    """Arrays [group][k_dim], scaled."""

    def add(self, q: npt.NDArray[Any], first_position: int, scale: float) -> None:
        """Add the queries [n][group][k_dim] of a micro-batch."""
        for token, rows in enumerate(q * scale):
            back = np.full(len(rows), -(first_position + token))
            self.queries.append(rotated(rows, back, self.rope))

    def expected_logits(self, k: Floats, newest: int, n_future: int) -> Floats:
        """Return the expected logits [group][T] of entries [T][k_dim], as the mean of a log-normal
        distribution.

        Averaging over the next n_future tokens rotates and shortens the mean query. Values are
        taken as independent, and the two values of a RoPE pair as equally distributed: their
        variance is the mean of both, plus the variance of the rotated mean.
        """
        weights = self.decay ** np.arange(len(self.queries))[::-1]
        rows = np.array(self.queries)
        mean = np.einsum("n,ngd->gd", weights, rows) / weights.sum()
        variance = np.einsum("n,ngd->gd", weights, rows**2) / weights.sum() - mean**2
        future = newest + 1 + np.arange(n_future)
        means = np.array([rotated(mean, np.full(len(mean), t), self.rope) for t in future])
        variance = variance + means.var(axis=0)
        for first, second in rope_pairs(self.rope):
            both = (variance[:, first] + variance[:, second]) / 2
            variance[:, first] = variance[:, second] = both
        return means.mean(axis=0) @ k.T + 0.5 * variance @ (k.T**2)


def expected_attention(logits: Floats, positions: Ints, n_sinks: int) -> Floats:
    """Return the softmax of logits [group][T] over entries that are not sinks, summed over query
    heads.
    """
    logits = np.where(positions < n_sinks, -np.inf, logits)
    if not np.isfinite(logits).any():
        return np.zeros(len(positions))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray((weights / weights.sum(axis=1, keepdims=True)).sum(axis=0))


SIMILAR = 0.9  # The cosine from which on the older of two keys counts less.
CONTEST = 512  # How many entries around the threshold are compared.


def distinctness(k: Floats, positions: Ints, scores: Floats, free: Bools, keep: int) -> Floats:
    """Return factors of the scores: less than 1 if a newer entry has a similar key.

    Only entries that an eviction decides on are compared: the free entries whose ranks are close to
    the last one that would stay.
    """
    factors = np.ones(len(k))
    candidates = np.flatnonzero(free)
    wanted = keep - (len(k) - len(candidates))
    if not 0 < wanted < len(candidates):
        return factors
    ranked = candidates[np.argsort(-scores[candidates], kind="stable")]
    last = min(len(ranked), max(wanted + CONTEST // 2, CONTEST))
    contest = sorted(ranked[max(0, last - CONTEST) : last], key=lambda i: int(positions[i]))
    lengths = np.linalg.norm(k[contest], axis=1, keepdims=True)
    keys = np.divide(k[contest], lengths, out=np.zeros_like(k[contest]), where=lengths > 0)
    for j, i in enumerate(contest[:-1]):
        cosine = float((keys[j + 1 :] @ keys[j]).max())
        factors[i] = min(1.0, (1.0 - cosine) / (1.0 - SIMILAR))
    return factors


def recency_score(position: int, newest: int, variation: float) -> float:
    """Return the BitNet document's score; float32 decides which positions are the newest tenth."""
    span = max(newest, 1)
    distance = newest - position
    in_newest_tenth = np.float32(distance) < np.float32(0.1) * np.float32(span)
    alpha = 2.0 / (span * (1.0 + variation))
    return float(np.exp(-alpha * distance)) + (0.5 if in_newest_tenth else 0.0)


def protected(positions: Ints, newest: int, n_sinks: int, recent_window: int) -> Bools:
    """Return which entries are protected from eviction."""
    return (positions < n_sinks) | (positions > newest - recent_window)


def select_survivors(
    scores: npt.NDArray[Any], positions: Ints, keep: int, n_sinks: int, recent: int, newest: int
) -> Bools:
    """Return the protected entries, then the highest scores up to `keep` (of equal ones, the
    first).
    """
    kept = protected(positions, newest, n_sinks, recent)
    for index in np.argsort(-scores, kind="stable"):
        if kept.sum() >= keep:
            break
        kept[index] = True
    return kept


def entries_to_keep(budget: int, n_new: int, n_sinks: int, recent_window: int) -> int:
    """Return how many entries an eviction leaves, with room for more tokens if they come one by
    one.
    """
    beyond_protection = budget - n_sinks - recent_window
    room = min(max(beyond_protection // 4, 1), DECODE_ROOM)
    return budget - max(room - n_new, 0)
