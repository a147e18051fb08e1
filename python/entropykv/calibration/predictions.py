"""Compare what a model predicts after half of a text: how it goes on, and the text itself again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropykv.session.echo import OVERLAP

LEAST_TEXT = 256
"""Shorter texts tell nothing: half of them is not much more than what is protected."""
CONTINUATION_FRACTION = 1 / 8
REPETITION_FRACTION = 1 / 16
"""Of the text: what is predicted."""

Logits = npt.NDArray[np.float32]


def half_of(text: Sequence[int]) -> Sequence[int]:
    """Return the half of a text that is read before anything is predicted."""
    return text[: len(text) // 2]


def predicted_tokens(length: int) -> int:
    """Return how many tokens of a text of `length` tokens are predicted after half of it."""
    return int(length * CONTINUATION_FRACTION) + int(length * REPETITION_FRACTION)


@dataclass(frozen=True)
class Prediction:
    """Hold what is predicted once half of a text was read."""

    request: Sequence[int]
    """Tokens of a request to repeat the text; none where it just goes on."""
    tokens: Sequence[int]

    def rows(self, predict: Callable[[Sequence[int]], Logits]) -> Logits:
        """Return log probabilities after each token, by logits that `predict` returns of tokens."""
        return _log_probabilities(predict([*self.request, *self.tokens])[len(self.request) :])

    def weight(self, whole: Logits) -> float:
        """Return how much it counts, by the rows with everything at hand.

        What is repeated counts by the share of it that the model repeats right: not every model
        follows a request.
        """
        if not self.request:
            return 1.0
        return float(np.mean(whole[:-1].argmax(axis=1) == np.asarray(self.tokens[1:])))


def predictions_after_half(
    text: Sequence[int], request: Sequence[int]
) -> tuple[Prediction, Prediction]:
    """Return how a text goes on after its first half, and its beginning, to be repeated."""
    half = len(text) // 2
    continuation = text[half : half + int(len(text) * CONTINUATION_FRACTION)]
    repeated = text[OVERLAP : OVERLAP + int(len(text) * REPETITION_FRACTION)]
    return Prediction([], continuation), Prediction(request, repeated)


def divergence(whole: Logits, rows: Logits) -> float:
    """Return the mean KL of predictions from those with everything, both as log probabilities.

    A token that is impossible with everything at hand adds nothing.
    """
    of_rows = []
    for a, b in zip(whole, rows, strict=True):
        possible = np.isfinite(a)
        log = a[possible].astype(np.float64)
        of_rows.append(float(np.exp(log) @ (log - b[possible])))
    return max(0.0, sum(of_rows) / len(of_rows))


def _log_probabilities(logits: Logits) -> Logits:
    """Turn logits into log probabilities, in place: there may be many."""
    for i, row in enumerate(logits):
        shifted = row - row.max()
        logits[i] = shifted - np.log(np.exp(shifted, dtype=np.float64).sum())
    return logits
