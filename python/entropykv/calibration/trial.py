"""Trial: which measure a model's predictions lose least with, inside a budget shared by its curves.

What a text shows of itself as it is read, and what keys and values predict that its repetition
would look at, rank entries differently, and which of them a model lives by is its own: one goes on
with what it read last, another one answers word for word. So half of a text is read inside a small
budget, once for each measure that policy auto can take, and the model predicts as for
layer_damage().
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from entropykv.calibration.predictions import (
    LEAST_TEXT,
    Prediction,
    half_of,
    predicted_tokens,
    predictions_after_half,
)
from entropykv.llamacpp.distributions import Logits, mean_divergence
from entropykv.profile.curves import IMPORTANCES, FloatArray
from entropykv.profile.profile import EntropyProfile
from entropykv.session.echo import REQUEST
from entropykv.session.session import Session

BUDGET = 0.1
"""What is kept of the half that is read: where there is much room, all measures keep the same."""


def trial_tokens(lengths: Sequence[int]) -> int:
    """Return how many tokens a trial with texts of these lengths reads."""
    of_one = sum(n // 2 + predicted_tokens(n) for n in lengths if n >= LEAST_TEXT)
    return (1 + len(IMPORTANCES)) * of_one


def best_importance(
    model: str | os.PathLike[str],
    profile: EntropyProfile,
    texts: Sequence[Sequence[int]],
    n_threads: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> str | None:
    """Return which of IMPORTANCES loses least, with the profile's curves and predictor.

    None for texts that are too short, and without a predictor.
    """
    losses = trial_losses(model, profile, texts, n_threads, on_progress)
    return None if losses is None else IMPORTANCES[int(losses.argmin())]


def trial_losses(
    model: str | os.PathLike[str],
    profile: EntropyProfile,
    texts: Sequence[Sequence[int]],
    n_threads: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> FloatArray | None:
    """Return what predictions lose with each of IMPORTANCES, (2,), in nats a token.

    The model is loaded anew for every measure and text, so that there is one at a time, and one
    text's logits. None for texts that are too short, and for a profile without a predictor, which
    all of IMPORTANCES need.
    """
    if profile.predictor is None:
        return None
    long_enough = [text for text in texts if len(text) >= LEAST_TEXT]
    if not long_enough:
        return None
    losses = np.zeros(len(IMPORTANCES))
    for text in long_enough:
        reader = _Reader(model, profile, n_threads, text, on_progress)
        whole = reader.rows("uniform", 1.0, "f16")
        for i, importance in enumerate(IMPORTANCES):
            rows = reader.rows(f"profile:{importance}", int(BUDGET * len(half_of(text))), "auto")
            losses[i] += sum(map(reader.loss, reader.predictions, whole, rows))
    return losses / len(long_enough)


class _Reader:
    """Reads half of a text inside different budgets, and predicts."""

    predictions: Sequence[Prediction] = ()

    def __init__(
        self,
        model: str | os.PathLike[str],
        profile: EntropyProfile,
        n_threads: int,
        text: Sequence[int],
        on_progress: Callable[[int], None],
    ) -> None:
        self._model, self._profile, self._n_threads = model, profile, n_threads
        self._text = text
        self._on_progress = on_progress

    def rows(self, policy: str, kv_budget: float, kv_type: str) -> list[Logits]:
        """Return the logits of every prediction."""
        rows = []
        with Session(
            self._model,
            n_ctx=len(self._text),
            kv_budget=kv_budget,
            kv_type=kv_type,
            policy=policy,
            store="headwise",
            entropy_config=self._profile,
            n_threads=self._n_threads,
            n_threads_batch=self._n_threads,
        ) as session:
            request = session.tokenize(REQUEST, add_bos=False)
            self.predictions = predictions_after_half(self._text, request)
            session.decode(half_of(self._text))
            state = session.save_state()
            for prediction in self.predictions:
                session.load_state(state)
                rows.append(prediction.rows(lambda ids: session.decode(ids, all_logits=True)))
        self._on_progress(len(half_of(self._text)) + predicted_tokens(len(self._text)))
        return rows

    @staticmethod
    def loss(prediction: Prediction, whole: Logits, rows: Logits) -> float:
        """Return the divergence of a prediction, as far as it counts."""
        return prediction.weight(whole) * mean_divergence(whole, rows)
