"""Define what a model must predict after half of a text: how it goes on, and its repetition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from entropykv.llamacpp.distributions import Logits
from entropykv.session.second_readings import OVERLAP

LEAST_TEXT = 256
"""The shortest text, in tokens, in which damage and trust are measured."""
CONTINUATION_FRACTION = 1 / 8
REPETITION_FRACTION = 1 / 16
"""CONTINUATION_FRACTION of a text is predicted after its first half, and REPETITION_FRACTION of it
as a repetition of its beginning.
"""


def half_of(text: Sequence[int]) -> Sequence[int]:
    """Return the first half of a text, which is read before anything is predicted."""
    return text[: len(text) // 2]


def predicted_tokens(length: int) -> int:
    """Return how many tokens of a text of `length` tokens are predicted after half of it."""
    return int(length * CONTINUATION_FRACTION) + int(length * REPETITION_FRACTION)


@dataclass(frozen=True)
class Prediction:
    """Hold tokens that a model predicts once half of a text was read."""

    request: Sequence[int]
    """Tokens of a request to repeat the text; empty if the text just continues."""
    tokens: Sequence[int]

    def rows(self, predict: Callable[[Sequence[int], int], Logits]) -> Logits:
        """Return the logits after each of `self.tokens`, (len(self.tokens), n_vocab).

        `predict` reads tokens and returns the logits after each of the last ones, as many as its
        second argument says.
        """
        return predict([*self.request, *self.tokens], len(self.tokens))

    def weight(self, whole: Logits) -> float:
        """Return the weight of this prediction, given the logits `whole` with all entries kept.

        A repetition is weighted by the share of tokens that the model then repeats correctly,
        because not every model follows a request.
        """
        if not self.request:
            return 1.0
        return float(np.mean(whole[:-1].argmax(axis=1) == np.asarray(self.tokens[1:])))


def predictions_after_half(
    text: Sequence[int], request: Sequence[int]
) -> tuple[Prediction, Prediction]:
    """Return two predictions: the continuation of a text after its first half, and a repetition of
    its beginning.
    """
    half = len(text) // 2
    continuation = text[half : half + int(len(text) * CONTINUATION_FRACTION)]
    repeated = text[OVERLAP : OVERLAP + int(len(text) * REPETITION_FRACTION)]
    return Prediction([], continuation), Prediction(request, repeated)
