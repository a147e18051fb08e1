"""Compare the logits and texts of a budgeted cache with those of the full cache, and repeated
measurements with each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from entropykv.llamacpp.distributions import Logits, divergences

MOST_DISAGREEMENT = 0.2
"""The largest acceptable disagreement; if rounds differ more, the machine was probably busy."""


@dataclass(frozen=True)
class Agreement:
    """Hold how close a model's predictions of a text are to those of a reference."""

    kl: float
    """The mean KL divergence of the model's predictions from the reference's, in nats."""
    top1: float
    """The fraction of positions at which the model and the reference hold the same next token most
    probable.
    """
    perplexity_ratio: float
    """The perplexity of the text divided by the reference's."""


class Comparison:
    """Compute an Agreement block by block, without keeping the logits."""

    def __init__(self) -> None:
        """Start without any rows."""
        self._kl = self._surplus = 0.0
        self._same = self._rows = self._known = 0

    def add(self, reference: Logits, other: Logits, following: Sequence[int]) -> None:
        """Add rows of logits, (tokens, n_vocab), and for each row the token that follows it in the
        text.

        The followers of the last rows may be unknown: these rows count only for KL divergence and
        top-1.
        """
        found = divergences(reference, other)
        known = np.asarray(following[: len(reference)], dtype=np.int64)
        rows = np.arange(len(known))
        logs = reference[rows, known] - found.norms[rows]
        other_logs = other[rows, known] - found.other_norms[rows]
        self._kl += float(found.kl.sum())
        self._same += int((reference.argmax(axis=1) == other.argmax(axis=1)).sum())
        self._surplus += float((logs - other_logs).sum())
        self._rows += len(reference)
        self._known += len(known)

    def result(self) -> Agreement:
        """Return the agreement over all rows that were added, at least two."""
        return Agreement(
            kl=self._kl / self._rows,
            top1=self._same / self._rows,
            perplexity_ratio=float(np.exp(self._surplus / self._known)),
        )


def compare(reference: Logits, other: Logits, tokens: Sequence[int]) -> Agreement:
    """Compare logits over `tokens`, each (len(tokens), n_vocab): row i is computed after tokens[i]
    and predicts tokens[i + 1].
    """
    comparison = Comparison()
    comparison.add(reference, other, tokens[1:])
    return comparison.result()


def equal_share(reference: Sequence[int], other: Sequence[int]) -> float:
    """Return the fraction of positions, up to the longer length, at which both texts have the same
    token; 1 if both are empty.
    """
    longest = max(len(reference), len(other))
    return sum(a == b for a, b in zip(reference, other, strict=False)) / longest if longest else 1.0


def disagreement(measured: Sequence[float]) -> float:
    """Return by what share the largest of `measured` exceeds the smallest; 0 if there are none."""
    return max(measured) / min(measured) - 1.0 if measured else 0.0


def disagreement_note(disagreements: Iterable[float]) -> str | None:
    """Return a warning for the user if some rounds disagree too much, else None."""
    worst = max(disagreements, default=0.0)
    if worst <= MOST_DISAGREEMENT:
        return None
    return (
        f"rounds disagree by up to {worst:.0%}: something else kept the machine busy; measure "
        "again while it is idle before you compare speeds"
    )
