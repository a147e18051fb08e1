"""Compare the next-token distributions that logits define."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

_BLOCK = 2
"""How many rows are converted to float64 at a time: two rows stay in the CPU's cache; with 32, a
row takes 2.5 times as long.
"""


def _blocks(n_rows: int) -> Iterator[slice]:
    """Yield slices of at most _BLOCK rows, to convert few rows to float64 at a time."""
    for first in range(0, n_rows, _BLOCK):
        yield slice(first, first + _BLOCK)


def log_softmax(logits: Logits) -> Floats:
    """Return the log-probabilities of every row, (tokens, n_vocab), in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


class Divergences(NamedTuple):
    """Hold for every row how far two distributions are apart, in nats; arrays are (rows,)."""

    kl: Floats
    """The KL divergence of the other logits' distribution from the reference's: the sum of p *
    log(p / q), where p is the reference's.
    """
    norms: Floats
    """The logarithm of the sum of the reference's exponentials: log-probabilities are logits minus
    this.
    """
    other_norms: Floats
    """The logarithm of the sum of the other logits' exponentials."""


def divergences(reference: Logits, other: Logits) -> Divergences:
    """Return how far the other logits are from the reference's, row by row: (rows, n_vocab) each.

    A token that the reference excludes, with a logit of minus infinity, adds nothing.
    """
    kl, norms, other_norms = (np.empty(len(reference)) for _ in range(3))
    for part in _blocks(len(reference)):
        (logs, most), (others, other_most) = map(_shifted, (reference[part], other[part]))
        shares = np.exp(logs)
        total = shares.sum(axis=1)
        surplus = np.subtract(logs, others, out=np.zeros_like(logs), where=shares > 0.0)
        other_total = np.exp(others, out=others).sum(axis=1)
        kl[part] = np.einsum("ij,ij->i", shares, surplus) / total + np.log(other_total / total)
        norms[part] = most + np.log(total)
        other_norms[part] = other_most + np.log(other_total)
    return Divergences(kl, norms, other_norms)


def _shifted(logits: Logits) -> tuple[Floats, Floats]:
    """Return logits whose largest of every row is 0, and what was subtracted, (rows,)."""
    most = logits.max(axis=1).astype(np.float64)
    return logits - most[:, None], most


def mean_divergence(reference: Logits, other: Logits) -> float:
    """Return the mean KL divergence of the other logits' distributions from the reference's, in
    nats, 0 or more; the logits are (rows, n_vocab).
    """
    return max(0.0, float(divergences(reference, other).kl.mean()))
