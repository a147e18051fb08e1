"""Try which measure of importance costs a model's predictions least, in a budget shared by its
curves.

The attention that a text gives to itself, and the predicted attention of a repetition, rank entries
differently. Models differ in which ranking they need: one mostly continues from the latest text,
another answers word for word. Therefore half of a text is read inside a small budget, once with
each measure that policy auto can take, and the model predicts as for layer_damage().
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
"""The fraction of the half that is kept; in a larger budget all measures keep the same entries."""


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
    """Return the measure in IMPORTANCES that loses least, with the profile's curves and predictor.

    Returns None if the texts are too short, or if the profile has no predictor.
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
    """Return the loss of predictions with each measure in IMPORTANCES, (2,), in nats per token.

    The model is loaded again for every measure and text, so that memory holds one model and one
    text's logits. Returns None if the texts are too short, or if the profile has no predictor,
    which both measures need.
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
    """Read half of a text inside different budgets, and predict what follows."""

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
        """Return the divergence of a prediction in nats per token, multiplied by its weight."""
        return prediction.weight(whole) * mean_divergence(whole, rows)
