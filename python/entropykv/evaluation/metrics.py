"""Logits of a budgeted cache against those of the full one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
"""(tokens, n_vocab)"""


@dataclass(frozen=True)
class Agreement:
    """How close one model's predictions of a text are to those of a reference."""

    kl: float
    """Mean KL divergence of the reference's distribution from this one, in nats."""
    top1: float
    """Share of tokens where both have the same most probable one."""
    perplexity_ratio: float
    """Perplexity of the text, relative to the reference's."""


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """Log-probabilities of every row, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def compare(reference: Logits, other: Logits, tokens: Sequence[int]) -> Agreement:
    """Agreement of logits over `tokens`: row i follows tokens[i] and predicts tokens[i + 1].

    The last row predicts nothing that is known: it counts for KL divergence and top-1 alone.
    """
    a, b = log_softmax(reference), log_softmax(other)
    rows, known = np.arange(len(tokens) - 1), np.asarray(tokens[1:], dtype=np.int64)
    return Agreement(
        kl=float((np.exp(a) * (a - b)).sum(axis=1).mean()),
        top1=float((a.argmax(axis=1) == b.argmax(axis=1)).mean()),
        perplexity_ratio=float(np.exp((a[rows, known] - b[rows, known]).mean())),
    )
