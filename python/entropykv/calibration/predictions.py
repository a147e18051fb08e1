"""Compare what a model predicts after half of a text: how it goes on, and the text itself again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from entropykv.llamacpp.distributions import Logits
from entropykv.session.echo import OVERLAP

LEAST_TEXT = 256
"""Shorter texts tell nothing: half of them is not much more than what is protected."""
CONTINUATION_FRACTION = 1 / 8
REPETITION_FRACTION = 1 / 16
"""Of the text: what is predicted."""


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
        """Return the logits after each token, by `predict`, which returns those of tokens."""
        return predict([*self.request, *self.tokens])[len(self.request) :]

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
