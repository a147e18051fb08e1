"""Compare the distributions over next tokens that logits stand for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
LogProbabilities = npt.NDArray[np.float64]

_BLOCK = 2
"""How many rows are in float64 at a time: so few stay in a CPU's cache, 32 take 2.5 times as
long."""


def blocks(n_rows: int) -> Iterator[slice]:
    """Yield the parts of so many rows that are small enough to be in float64."""
    for first in range(0, n_rows, _BLOCK):
        yield slice(first, first + _BLOCK)


def log_softmax(logits: Logits) -> LogProbabilities:
    """Return the log-probabilities of every row, (tokens, n_vocab), in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: LogProbabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def divergences(reference: LogProbabilities, other: LogProbabilities) -> npt.NDArray[np.float64]:
    """Return the KL divergence of every row of `other` from that of `reference`, in nats.

    A token that is impossible by the reference, with a logit of minus infinity, adds nothing.
    """
    surplus = np.zeros_like(reference)
    np.subtract(reference, other, out=surplus, where=np.isfinite(reference))
    result: npt.NDArray[np.float64] = (np.exp(reference) * surplus).sum(axis=1)
    return result


def mean_divergence(reference: Logits, other: Logits) -> float:
    """Return the mean KL divergence of logits from those of a reference, in nats, 0 or more."""
    total = 0.0
    for part in blocks(len(reference)):
        rows = divergences(log_softmax(reference[part]), log_softmax(other[part]))
        total += float(rows.sum())
    return max(0.0, total / len(reference))
