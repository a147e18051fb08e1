"""Try which measure of importance costs a model's predictions least, in a budget shared by its
curves.

The attention that a text gives to itself, and the predicted attention of a repetition, rank entries
differently. Models differ in which ranking they need: one mostly continues from the latest text,
another answers word for word. Therefore half of a text is read inside a small budget, once with
each measure that policy auto can take, and the model predicts as for layer_damage().
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from entropykv.calibration.predictions import (
    LEAST_TEXT,
    Prediction,
    half_of,
    predicted_tokens,
    predictions_after_half,
)
from entropykv.calibration.spread import Arrays, Spread, StepSettings, TextWork
from entropykv.errors import SettingsError
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
    spread: Spread,
    settings: StepSettings,
    texts: Sequence[tuple[int, ...]],
    on_progress: Callable[[int], None] = lambda _: None,
) -> str | None:
    """Return the measure in IMPORTANCES that loses least, with the curves and predictor of
    settings.profile.

    Returns None if the texts are too short, or if the profile has no predictor.
    """
    losses = trial_losses(spread, settings, texts, on_progress)
    return None if losses is None else IMPORTANCES[int(losses.argmin())]


def trial_losses(
    spread: Spread,
    settings: StepSettings,
    texts: Sequence[tuple[int, ...]],
    on_progress: Callable[[int], None] = lambda _: None,
) -> FloatArray | None:
    """Return the loss of predictions with each measure in IMPORTANCES, (2,), in nats per token.

    The model is loaded again for every measure and text, so that memory holds one model and one
    text's logits. Returns None if the texts are too short, or if the profile has no predictor,
    which both measures need.
    """
    if settings.profile is None or settings.profile.predictor is None:
        return None
    work = [TextWork("trial", (text,)) for text in texts if len(text) >= LEAST_TEXT]
    if not work:
        return None
    losses = np.zeros(len(IMPORTANCES))
    for (of_text,) in spread.run(try_measures, settings, work, on_progress):
        losses += of_text
    return losses / len(work)


def try_measures(
    settings: StepSettings, work: Sequence[TextWork], on_progress: Callable[[int], None]
) -> Iterator[Arrays]:
    """Yield the losses of each text with each measure, (len(IMPORTANCES),): a Step."""
    if settings.profile is None:
        raise SettingsError("budgets are shared by the curves of a profile; give one")
    for each in work:
        (text,) = each.texts
        reader = _Reader(settings.path, settings.profile, settings.n_threads, text, on_progress)
        whole = reader.rows("uniform", 1.0, "f16")
        losses = np.zeros(len(IMPORTANCES))
        for i, importance in enumerate(IMPORTANCES):
            rows = reader.rows(f"profile:{importance}", int(BUDGET * len(half_of(text))), "auto")
            losses[i] = sum(map(reader.loss, reader.predictions, whole, rows))
        yield (losses,)


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
