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


def divergences(reference: Logits, other: Logits) -> npt.NDArray[np.float64]:
    """Return the KL divergence from the reference's logits to the others for every row, in nats.

    A token that the reference excludes, with a logit of minus infinity, adds nothing.
    """
    found = np.empty(len(reference))
    for part in blocks(len(reference)):
        logs, others = (
            logits[part] - logits[part].max(axis=1, keepdims=True).astype(np.float64)
            for logits in (reference, other)
        )
        shares = np.exp(logs)
        total = shares.sum(axis=1)
        surplus = np.subtract(logs, others, out=np.zeros_like(logs), where=shares > 0.0)
        log_ratio = np.log(np.exp(others, out=others).sum(axis=1) / total)
        found[part] = np.einsum("ij,ij->i", shares, surplus) / total + log_ratio
    return found


def mean_divergence(reference: Logits, other: Logits) -> float:
    """Return the mean KL divergence from the reference's logits to the others, in nats, 0
    or more.
    """
    return max(0.0, float(divergences(reference, other).mean()))
