"""Compare the next-token distributions that logits define."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
LogProbabilities = npt.NDArray[np.float64]

_BLOCK = 2
"""How many rows are converted to float64 at a time: two stay in the CPU's cache, 32 take 2.5 times
as long.
"""


def blocks(n_rows: int) -> Iterator[slice]:
    """Yield slices of at most _BLOCK rows, to convert few rows to float64 at a time."""
    for first in range(0, n_rows, _BLOCK):
        yield slice(first, first + _BLOCK)


def log_softmax(logits: Logits) -> LogProbabilities:
    """Return the log-probabilities of every row, (tokens, n_vocab), in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: LogProbabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def divergences(reference: LogProbabilities, other: LogProbabilities) -> npt.NDArray[np.float64]:
    """Return the KL divergence from `reference` to `other` for every row, in nats.

    A token that the reference excludes, with a logit of minus infinity, adds nothing.
    """
    surplus = np.zeros_like(reference)
    np.subtract(reference, other, out=surplus, where=np.isfinite(reference))
    result: npt.NDArray[np.float64] = (np.exp(reference) * surplus).sum(axis=1)
    return result


def mean_divergence(reference: Logits, other: Logits) -> float:
    """Return the mean KL divergence from the reference's logits to the others, in nats, 0
    or more.
    """
    total = 0.0
    for part in blocks(len(reference)):
        rows = divergences(log_softmax(reference[part]), log_softmax(other[part]))
        total += float(rows.sum())
    return max(0.0, total / len(reference))
